from object_servers import moto, rclone

__all__ = ["moto", "rclone"]
