"""What users import under the names that ARK gave: `import ark` and the aliases offer all of it."""
