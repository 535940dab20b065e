"""Air-gapped bundles: packages and images for hosts without a network, in one folder."""
