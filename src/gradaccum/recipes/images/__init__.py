"""Images for the recipes: photographs that a package brings along, or a folder of the user's."""
