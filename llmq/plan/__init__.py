"""What a model needs and how fast it can be on a chip, worked out before one is rented: from headers only."""
