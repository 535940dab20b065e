"""What is done to hosts: facts, checks, steps, images, Ray, models and data sets."""
