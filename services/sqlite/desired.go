package sqlite

import (
	"context"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Desired returns the full desired state of a host, with its stamp. It names every run that the host was given and is not yet known to
// hold nothing of; one that has ended here as one to stop. A run whose record cannot be read is left out, so that its host leaves it alone.
func (db *DB) Desired(ctx context.Context, host fleet.HostID) (d fleet.DesiredHost, err error) {
	err = db.read(ctx, func(t *tx) error {
		h, err := t.host(host)
		if err != nil {
			return err
		}
		d = fleet.DesiredHost{Host: host, Stamp: fleet.Stamp{DatabaseGeneration: db.generation.Load(), HostSession: h.Session, Generation: h.Generation}}
		pool, err := t.poolByName(h.Pool)
		if err != nil {
			return err
		}
		keys, err := all(t, scanWith(func(k *fleet.RunKey) []any { return []any{&k.Workspace, &k.Epoch} }),
			`SELECT workspace, epoch FROM run WHERE host = ? AND host_clear = 0 ORDER BY workspace, epoch`, host)
		if err != nil {
			return err
		}
		for _, key := range keys {
			run, err := t.desiredRun(key)
			if isDamaged(err) {
				db.log.Error("a workspace's record cannot be read; its container is left alone", "workspace", key.Workspace, "epoch", key.Epoch, "error", err)
				continue
			}
			if err != nil {
				return err
			}
			run.PoolSudo = pool.Sudo
			d.Runs = append(d.Runs, run)
		}
		// A volume's time is measured by the newest commit, which is never later than now.
		d.VolumesGone, err = all(t, scanString[fleet.VolumeID], `SELECT id FROM volume WHERE host = ? AND deleted_at <= ? AND removed_at IS NULL
			AND NOT EXISTS (SELECT 1 FROM mount WHERE mount.volume = volume.id AND mount.live = 1) ORDER BY id`, host, t.now-fleet.VolumeRetention.Milliseconds())
		if err != nil {
			return err
		}
		d.Excluded, err = all(t, scanString[fleet.DeviceID], `SELECT id FROM device WHERE host = ? AND excluded = 1 ORDER BY id`, host)
		return err
	})
	return d, err
}

func (t *tx) desiredRun(key fleet.RunKey) (d fleet.DesiredRun, err error) {
	if d.Run, err = t.run(key); err != nil {
		return d, err
	}
	if !d.Run.GoneAt.IsZero() {
		d.Run.Goal = fleet.GoalStopped
	}
	if d.Workspace, err = t.workspace(key.Workspace); err != nil {
		return d, err
	}
	if d.Owner, err = t.user(d.Workspace.Owner); err != nil {
		return d, err
	}
	if !d.Owner.Disabled && d.Owner.DeletedAt.IsZero() {
		if d.Keys, err = t.deviceKeys(d.Owner.ID); err != nil {
			return d, err
		}
	}
	if d.Mounts, err = t.mounts(key); err != nil {
		return d, err
	}
	simulated, err := all(t, scanString[fleet.DeviceID], `SELECT device.id FROM lease JOIN device ON device.id = lease.device WHERE lease.workspace = ? AND lease.epoch = ? AND device.simulated = 1`,
		key.Workspace, key.Epoch)
	if err != nil {
		return d, err
	}
	d.Simulated = make(map[fleet.DeviceID]bool, len(simulated))
	for _, id := range simulated {
		d.Simulated[id] = true
	}
	return d, nil
}
