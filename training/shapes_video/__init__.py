"""How `triptych/shapes-video` is made: drawn clips, captions, checker, encoder, clip model and evaluation."""
