package sqlite

import (
	"context"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const imageColumns = `image.name, image.reference, image.digest, image.host, image.description, image.is_default, image.require_cuda, image.size_bytes, image.created_at`

func scanImage(s scanner) (i fleet.Image, err error) {
	err = s.Scan(&i.Name, &i.Reference, &i.Digest, textInto[fleet.HostID]{&i.Host}, &i.Description, &i.Default, &i.RequireCUDA, &i.SizeBytes, timeInto{&i.CreatedAt})
	return i, err
}

// Images returns the catalogue by name.
func (db *DB) Images(ctx context.Context) (images []fleet.Image, err error) {
	err = db.read(ctx, func(t *tx) error {
		images, err = all(t, scanImage, `SELECT `+imageColumns+` FROM image ORDER BY name`)
		return err
	})
	return images, err
}

// Image returns one entry. KindNotFound.
func (db *DB) Image(ctx context.Context, name string) (image fleet.Image, err error) {
	err = db.read(ctx, func(t *tx) error {
		image, err = scanImage(t.row(`SELECT `+imageColumns+` FROM image WHERE name = ?`, name))
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no image %q in the catalogue; `carrel image ls` shows all", clip(name))
		}
		return err
	})
	return image, err
}

// PutImage adds an entry or replaces the one of its name; the age of a replaced one stays. The first entry becomes the default.
func (db *DB) PutImage(ctx context.Context, image fleet.Image, now time.Time) (fleet.Image, error) {
	if image.Name == "" || len(image.Name) > 128 || strings.ContainsAny(image.Name, " \t\r\n@") {
		return image, fleet.Errorf(fleet.KindInvalid, "image name %q: use 1 to 128 characters without spaces and @", clip(image.Name))
	}
	if image.Reference == "" {
		return image, fleet.Errorf(fleet.KindInvalid, "image %s needs a reference, such as registry.example/cuda:12.6", image.Name)
	}
	err := db.write(ctx, now, func(t *tx) error {
		var others int
		if err := t.row(`SELECT count(*) FROM image WHERE is_default = 1 AND name <> ?`, image.Name).Scan(&others); err != nil {
			return err
		}
		image.Default = image.Default || others == 0
		if image.Default {
			if err := t.exec(`UPDATE image SET is_default = 0 WHERE is_default = 1 AND name <> ?`, image.Name); err != nil {
				return err
			}
		}
		err := t.exec(`INSERT INTO image (name, reference, digest, host, description, is_default, require_cuda, size_bytes, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
			ON CONFLICT (name) DO UPDATE SET reference = excluded.reference, digest = excluded.digest, host = excluded.host, description = excluded.description,
			is_default = excluded.is_default, require_cuda = excluded.require_cuda, size_bytes = excluded.size_bytes`,
			image.Name, image.Reference, image.Digest, textArg(image.Host), image.Description, image.Default, image.RequireCUDA, image.SizeBytes, t.now)
		if err != nil {
			return err
		}
		image, err = scanImage(t.row(`SELECT `+imageColumns+` FROM image WHERE name = ?`, image.Name))
		return err
	})
	return image, err
}

// RemoveImage takes an entry out of the catalogue and tells how many workspaces that are not deleted use its digest; they keep it.
func (db *DB) RemoveImage(ctx context.Context, name string) (workspaces int, err error) {
	err = db.write(ctx, fromMillis(0), func(t *tx) error {
		image, err := scanImage(t.row(`SELECT `+imageColumns+` FROM image WHERE name = ?`, name))
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no image %q in the catalogue", clip(name))
		}
		if err != nil {
			return err
		}
		if workspaces, err = t.imageUse(image.Digest); err != nil {
			return err
		}
		return t.exec(`DELETE FROM image WHERE name = ?`, name)
	})
	return workspaces, err
}

// ImageUse tells how many workspaces that are not deleted use a digest.
func (db *DB) ImageUse(ctx context.Context, digest string) (workspaces int, err error) {
	err = db.read(ctx, func(t *tx) error {
		workspaces, err = t.imageUse(digest)
		return err
	})
	return workspaces, err
}

func (t *tx) imageUse(digest string) (n int, err error) {
	if digest == "" {
		return 0, nil
	}
	err = t.row(`SELECT count(*) FROM workspace WHERE state <> 'deleted' AND json_valid(spec) AND json_extract(spec, '$.ImageDigest') = ?`, digest).Scan(&n)
	return n, err
}
