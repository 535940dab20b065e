"""A run as one web page: its numbers drawn, beside another run's where one is compared; also served live."""
