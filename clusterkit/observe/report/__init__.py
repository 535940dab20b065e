"""A run as one web page with plots, compared with another run on request; also served live."""
