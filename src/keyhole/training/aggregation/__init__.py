"""How the updates of a round are added up: in the clear, or so that nobody sees one of them."""
