"""Routes that generate no text: information, development, records, profiles, pools."""
