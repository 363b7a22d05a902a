"""One line each to put fovea behind another library's attention; nothing happens on import."""
