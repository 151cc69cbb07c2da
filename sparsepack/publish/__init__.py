"""What others see of an artifact: its model card, the report of a recipe's run, the upload to the hub."""
