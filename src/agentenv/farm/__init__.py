"""A farm from its operators' point of view: finding it, its state, its orphans. Used by the command and by any page."""
