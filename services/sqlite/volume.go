package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const volumeQuery = `SELECT volume.id, volume.name, volume.owner, owner.name, volume.host, host.name, volume.home_of, volume.created_at, volume.deleted_at, volume.removed_at
	FROM volume JOIN user AS owner ON owner.id = volume.owner LEFT JOIN host ON host.id = volume.host`

func volumeInto(v *fleet.Volume) []any {
	return []any{
		&v.ID, &v.Name, &v.Owner, &v.OwnerName,
		textInto[fleet.HostID]{&v.Host},
		textInto[string]{&v.HostName},
		&v.HomeOf,
		timeInto{&v.CreatedAt},
		timeInto{&v.DeletedAt},
		timeInto{&v.RemovedAt},
	}
}

// Volumes returns volumes by owner, then name; an empty owner means everybody's. Deleted ones come only where asked for, and only
// while they can be restored.
func (db *DB) Volumes(ctx context.Context, owner fleet.UserID, includeDeleted bool) (volumes []fleet.Volume, err error) {
	err = db.read(ctx, func(t *tx) error {
		volumes, err = all(t, scanWith(volumeInto), volumeQuery+`
			WHERE (?1 = '' OR volume.owner = ?1) AND (volume.deleted_at IS NULL OR (?2 AND volume.removed_at IS NULL AND volume.deleted_at > ?3))
			ORDER BY owner.name, volume.name, volume.deleted_at`, owner, includeDeleted, t.now-fleet.VolumeRetention.Milliseconds())
		if err != nil {
			return err
		}
		index := map[fleet.VolumeID]int{}
		for i, v := range volumes {
			index[v.ID] = i
		}
		return each(t, func(s scanner) error {
			var id fleet.VolumeID
			var user string
			if err := s.Scan(&id, &user); err != nil {
				return err
			}
			if i, ok := index[id]; ok {
				volumes[i].UsedBy = append(volumes[i].UsedBy, user)
			}
			return nil
		}, `SELECT DISTINCT mount.volume, workspace.name`+mountUse+` ORDER BY workspace.name`)
	})
	return volumes, err
}

// mountUse are the mounts of workspaces that are not stopped, and of runs that may still be there.
const mountUse = ` FROM mount JOIN workspace ON workspace.id = mount.workspace
	WHERE mount.volume IS NOT NULL AND (mount.live = 1 OR (mount.epoch = workspace.epoch AND workspace.state IN ('queued', 'pulling', 'starting', 'running', 'stopping')))`

// users returns the names of workspaces that use a volume now.
func (t *tx) users(id fleet.VolumeID) ([]string, error) {
	return all(t, scanString[string], `SELECT DISTINCT workspace.name`+mountUse+` AND mount.volume = ? ORDER BY workspace.name`, id)
}

// DeleteVolume marks a volume deleted; it can be restored for fleet.VolumeRetention. KindConflict names the workspaces that mount it and
// are not stopped; KindNotFound. An empty owner means anybody's, by id.
func (db *DB) DeleteVolume(ctx context.Context, owner fleet.UserID, idOrName string, now time.Time) (v fleet.Volume, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		v, err = scanWith(volumeInto)(t.row(volumeQuery+` WHERE volume.deleted_at IS NULL AND ((?1 = '' AND volume.id = ?2) OR (volume.owner = ?1 AND (volume.id = ?2 OR volume.name = ?2)))
			ORDER BY volume.id = ?2 DESC LIMIT 1`, owner, idOrName))
		if isNoRows(err) {
			return fleet.Errorf(fleet.KindNotFound, "there is no volume %q; `carrel volume ls` shows yours", clip(idOrName))
		}
		if err != nil {
			return err
		}
		users, err := t.users(v.ID)
		if err != nil {
			return err
		}
		if len(users) > 0 {
			return fleet.Errorf(fleet.KindConflict, "volume %s is in use by %s; stop that first", v.Name, list(users))
		}
		v.DeletedAt = fromMillis(t.now)
		return t.exec(`UPDATE volume SET deleted_at = ? WHERE id = ?`, t.now, v.ID)
	})
	return v, err
}

// RestoreVolume takes back a delete, under a new name where one is given. KindNotFound, KindExists when the name is taken, KindConflict
// when it is too late, KindInvalid when several deleted volumes have the name.
func (db *DB) RestoreVolume(ctx context.Context, owner fleet.UserID, idOrName, as string, now time.Time) (v fleet.Volume, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		found, err := all(t, scanWith(volumeInto), volumeQuery+` WHERE volume.deleted_at IS NOT NULL AND volume.removed_at IS NULL AND volume.deleted_at > ?3
			AND ((?1 = '' AND volume.id = ?2) OR (volume.owner = ?1 AND (volume.id = ?2 OR volume.name = ?2))) ORDER BY volume.deleted_at DESC`,
			owner, idOrName, t.now-fleet.VolumeRetention.Milliseconds())
		if err != nil {
			return err
		}
		switch len(found) {
		case 0:
			return fleet.Errorf(fleet.KindNotFound, "there is no deleted volume %q that can be restored (it is kept for %d days)", clip(idOrName), int(fleet.VolumeRetention.Hours()/24))
		case 1:
		default:
			ids := make([]string, 0, len(found))
			for _, f := range found {
				ids = append(ids, fmt.Sprintf("%s (deleted %s)", f.ID, f.DeletedAt.Format(time.DateTime)))
			}
			return fleet.Errorf(fleet.KindInvalid, "%d deleted volumes are called %s; name one by its id: %s", len(found), clip(idOrName), list(ids))
		}
		v = found[0]
		if as != "" {
			if err := fleet.CheckVolumeName(as); err != nil {
				return err
			}
			v.Name = as
		}
		err = t.exec(`UPDATE volume SET deleted_at = NULL, name = ? WHERE id = ?`, v.Name, v.ID)
		if isUnique(err) {
			return fleet.Errorf(fleet.KindExists, "there is a volume %s already; restore this one under another name with --as NAME", v.Name)
		}
		v.DeletedAt = time.Time{}
		return err
	})
	return v, err
}

// ExpiredVolumes returns deleted volumes that can no longer be restored and whose data a host may still have.
func (db *DB) ExpiredVolumes(ctx context.Context, now time.Time) (volumes []fleet.Volume, err error) {
	err = db.read(ctx, func(t *tx) error {
		volumes, err = all(t, scanWith(volumeInto), volumeQuery+` WHERE volume.deleted_at <= ? AND volume.removed_at IS NULL AND volume.host IS NOT NULL ORDER BY volume.id`,
			millis(now)-fleet.VolumeRetention.Milliseconds())
		return err
	})
	return volumes, err
}

func (t *tx) volumeByName(owner fleet.UserID, name string) (fleet.Volume, error) {
	return scanWith(volumeInto)(t.row(volumeQuery+` WHERE volume.owner = ? AND volume.name = ? AND volume.deleted_at IS NULL`, owner, name))
}

// ensureVolume finds a volume of an owner, or makes it; existed tells which.
func (t *tx) ensureVolume(owner fleet.UserID, name, homeOf string) (v fleet.Volume, existed bool, err error) {
	v, err = t.volumeByName(owner, name)
	if err == nil {
		return v, true, nil
	}
	if !isNoRows(err) {
		return v, false, err
	}
	if err := fleet.CheckVolumeName(name); err != nil {
		return v, false, err
	}
	id, err := t.newID()
	if err != nil {
		return v, false, err
	}
	if err := t.exec(`INSERT INTO volume (id, name, owner, home_of, created_at) VALUES (?, ?, ?, ?, ?)`, id, name, owner, homeOf, t.now); err != nil {
		return v, false, fmt.Errorf("make volume %s: %w", name, err)
	}
	v, err = t.volumeByName(owner, name)
	return v, false, err
}

// renameAway frees a volume's name: `demo-home` becomes `demo-home-2` or the next free number.
func (t *tx) renameAway(owner fleet.UserID, name string) error {
	v, err := t.volumeByName(owner, name)
	if isNoRows(err) {
		return nil
	}
	if err != nil {
		return err
	}
	users, err := t.users(v.ID)
	if err != nil {
		return err
	}
	if len(users) > 0 {
		return fleet.Errorf(fleet.KindConflict, "volume %s is in use by %s; stop that first", name, list(users))
	}
	for n := 2; n < 1000; n++ {
		suffix := fmt.Sprintf("-%d", n)
		other := name[:min(len(name), 40-len(suffix))] + suffix
		n, err := t.affect(`UPDATE OR IGNORE volume SET name = ? WHERE id = ?`, other, v.ID)
		if err != nil || n == 1 {
			return err
		}
	}
	return fleet.Errorf(fleet.KindConflict, "there are too many volumes called %s-N; delete some", name)
}
