package sqlite

import (
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// homeMount is a workspace's home as asked for at creation; an empty volume name means none.
type homeMount struct{ volume, target string }

// layMounts writes the mounts of a run, home first, and makes volumes that are not there. With found only, a named volume that is
// missing is an error, since a start must not bring an empty one in place of a deleted one.
func (t *tx) layMounts(w *fleet.Workspace, epoch int64, home homeMount, spec *fleet.Spec, missing missingVolumes) error {
	if err := t.exec(`DELETE FROM mount WHERE workspace = ? AND epoch = ? AND live = 0`, w.ID, epoch); err != nil {
		return err
	}
	position := 0
	add := func(volume fleet.VolumeID, use fleet.VolumeUse, isHome bool) error {
		err := t.exec(`INSERT INTO mount (workspace, epoch, position, volume, name, target, read_only, home, live) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)`,
			w.ID, epoch, position, textArg(volume), use.Volume, use.Target, use.ReadOnly, isHome)
		if isUnique(err) {
			return fleet.Errorf(fleet.KindInvalid, "two volumes are to be mounted at %s; give each a path of its own", use.Target)
		}
		position++
		return err
	}
	if home.volume != "" {
		v, _, err := t.ensureVolume(w.Owner, home.volume, w.Name)
		if err != nil {
			return err
		}
		if err := add(v.ID, fleet.VolumeUse{Volume: v.Name, Target: home.target}, true); err != nil {
			return err
		}
	}
	for _, use := range spec.Volumes {
		id, use, err := t.resolveVolume(w, use, missing)
		if err != nil {
			return err
		}
		if err := add(id, use, false); err != nil {
			return err
		}
	}
	return nil
}

// missingVolumes says what to do about a named volume that is not there.
type missingVolumes int

const (
	makeMissing missingVolumes = iota
	refuseMissing
)

// resolveVolume finds what a use means: a mount that an admin declared (no id), or a volume of the owner.
func (t *tx) resolveVolume(w *fleet.Workspace, use fleet.VolumeUse, missing missingVolumes) (fleet.VolumeID, fleet.VolumeUse, error) {
	if declared, ok := t.db.declared[use.Volume]; ok {
		use.ReadOnly = use.ReadOnly || declared.ReadOnly
		return "", use, nil
	}
	if missing == makeMissing {
		v, _, err := t.ensureVolume(w.Owner, use.Volume, "")
		return v.ID, use, err
	}
	v, err := t.volumeByName(w.Owner, use.Volume)
	if isNoRows(err) {
		return "", use, fleet.Errorf(fleet.KindConflict, "volume %s of workspace %s is not there any more; restore it (`carrel volume restore %s`) or take it out (`carrel update`)", use.Volume, w.Name, use.Volume)
	}
	return v.ID, use, err
}

// home is what a workspace was created with.
func (t *tx) home(id fleet.WorkspaceID) (h homeMount, grace time.Duration, err error) {
	err = t.row(`SELECT home_volume, home_target, stop_grace_ms FROM workspace WHERE id = ?`, id).Scan(&h.volume, &h.target, durationInto{&grace})
	return h, grace, err
}

const mountColumns = `mount.volume, mount.name, mount.target, mount.read_only, mount.home`

// mount completes a row with what the admin declares now.
func (t *tx) mount(s scanner, before ...any) (fleet.Mount, error) {
	var m fleet.Mount
	err := s.Scan(append(before, textInto[fleet.VolumeID]{&m.Volume}, &m.Name, &m.Target, &m.ReadOnly, &m.Home)...)
	if err == nil && m.Volume == "" {
		declared := t.db.declared[m.Name] // zero when it is no longer declared: the agent refuses the empty path
		m.HostPath, m.Public, m.ReadOnly = declared.HostPath, declared.Public, m.ReadOnly || declared.ReadOnly
	}
	return m, err
}

func (t *tx) mounts(key fleet.RunKey) ([]fleet.Mount, error) {
	return all(t, func(s scanner) (fleet.Mount, error) { return t.mount(s) },
		`SELECT `+mountColumns+` FROM mount WHERE workspace = ? AND epoch = ? ORDER BY position`, key.Workspace, key.Epoch)
}

// checkMounts says whether a run's volumes can be given to it on a host: each lies there or nowhere yet, and has no live writer. It
// returns those that lie nowhere yet. The error is fleet.KindConflict with the reason.
func (t *tx) checkMounts(key fleet.RunKey, host fleet.HostID) (fresh []fleet.VolumeID, err error) {
	err = each(t, func(s scanner) error {
		var id fleet.VolumeID
		var name, writer string
		var lies fleet.HostID
		var deleted time.Time
		if err := s.Scan(&id, &name, textInto[fleet.HostID]{&lies}, timeInto{&deleted}, textInto[string]{&writer}); err != nil {
			return err
		}
		switch {
		case !deleted.IsZero():
			return fleet.Errorf(fleet.KindConflict, "volume %s was deleted", name)
		case lies != "" && lies != host:
			return fleet.Errorf(fleet.KindConflict, "volume %s lies on another host", name)
		case writer != "":
			return fleet.Errorf(fleet.KindConflict, "volume %s is written by another workspace", name)
		case lies == "":
			fresh = append(fresh, id)
		}
		return nil
	}, `SELECT volume.id, volume.name, volume.host, volume.deleted_at,
		CASE WHEN mount.read_only = 0 THEN (SELECT taken.workspace FROM mount AS taken WHERE taken.volume = mount.volume AND taken.live = 1 AND taken.read_only = 0) END
		FROM mount JOIN volume ON volume.id = mount.volume WHERE mount.workspace = ? AND mount.epoch = ? ORDER BY mount.position`, key.Workspace, key.Epoch)
	return fresh, err
}

// openMounts makes a placed run's mounts live: a volume lies on the run's host from its first placement on, and has one live writer.
func (t *tx) openMounts(key fleet.RunKey, host fleet.HostID, fresh []fleet.VolumeID) error {
	for _, id := range fresh {
		if err := t.exec(`UPDATE volume SET host = ? WHERE id = ? AND host IS NULL`, host, id); err != nil {
			return err
		}
	}
	err := t.exec(`UPDATE mount SET live = 1 WHERE workspace = ? AND epoch = ?`, key.Workspace, key.Epoch)
	if isUnique(err) {
		return fleet.Errorf(fleet.KindConflict, "a volume of it is written by another workspace")
	}
	if err != nil {
		return fmt.Errorf("mounts of %s: %w", key.ContainerName(), err)
	}
	return nil
}

func (t *tx) closeMounts(key fleet.RunKey) error {
	return t.exec(`UPDATE mount SET live = 0 WHERE workspace = ? AND epoch = ? AND live = 1`, key.Workspace, key.Epoch)
}
