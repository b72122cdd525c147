"""What a person sees: the data of the page, and the one file that carries page and data together."""
