"""Where every element is stored: arithmetic on integers and shapes, without process groups, modules
or devices."""
