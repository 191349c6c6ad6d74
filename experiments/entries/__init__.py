"""The entries of the catalogue, family by family as in ``lowcomm.algorithms``."""
