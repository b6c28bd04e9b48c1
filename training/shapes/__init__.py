"""The recipe of `triptych/shapes`: drawn scenes with captions, a text encoder that parses, a picture model, and their
judge."""
