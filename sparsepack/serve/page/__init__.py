"""The page for a browser: a chat with the model. Plain files; nothing builds them, and they ask no other server."""
