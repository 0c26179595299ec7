"""Models behind one interface, `models.api`: a config in; parameters as plain dicts and pure functions out."""
