"""How verbs declare their options: from option dataclasses, in groups, refused where they do nothing."""
