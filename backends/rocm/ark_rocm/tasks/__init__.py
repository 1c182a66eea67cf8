"""Task bodies that live on AMD's matrix units; everything else comes from ark.tasks."""
