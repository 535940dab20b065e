"""How a memory grew in one recorded trajectory: what every turn wrote, and its reward."""
