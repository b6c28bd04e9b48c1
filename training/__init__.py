"""Recipes that make the embedded models; not part of the installed package."""
