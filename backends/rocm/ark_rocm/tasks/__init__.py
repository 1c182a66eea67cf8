"""Task bodies that live on AMD's matrix units or loads to LDS; everything else comes from
ark.tasks.
"""
