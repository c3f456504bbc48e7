"""Adds up the updates of a round: in the clear, or so that nobody sees one of them."""
