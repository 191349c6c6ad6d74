"""Published methods, each a short composition of the parts."""
