"""Networks, masks and routings. Knows no objective."""
