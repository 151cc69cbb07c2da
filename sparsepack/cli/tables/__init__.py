"""Results as text for people: Markdown tables, which read well in a terminal and paste into an issue."""
