package sqlite

import (
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

const leaseQuery = `SELECT lease.id, lease.device, lease.workspace, lease.epoch, lease.host, host.name, lease.model, lease.user, user.name, lease.project, lease.pool,
	workspace.name, lease.started_at, lease.ended_at, lease.released_at, lease.released_at IS NULL AND (host.fenced = 1 OR coalesce(host.last_seen, 0) < ?1)
	FROM lease JOIN host ON host.id = lease.host JOIN user ON user.id = lease.user JOIN workspace ON workspace.id = lease.workspace`

func leaseInto(l *fleet.Lease) []any {
	return []any{
		&l.ID, &l.Device, &l.Run.Workspace, &l.Run.Epoch, &l.Host, &l.HostName, &l.Model, &l.User, &l.UserName, &l.Project, &l.Pool,
		&l.Workspace,
		timeInto{&l.StartedAt},
		timeInto{&l.EndedAt},
		timeInto{&l.ReleasedAt},
		&l.Provisional,
	}
}

// silentSince is the moment before which a host must have been seen last to count as not answering.
func (t *tx) silentSince() int64 { return t.now - t.db.opts.UnreachableAfter.Milliseconds() }

func (t *tx) openLeases() (map[fleet.DeviceID]fleet.Lease, error) {
	leases, err := all(t, scanWith(leaseInto), leaseQuery+` WHERE lease.released_at IS NULL`, t.silentSince())
	if err != nil {
		return nil, err
	}
	held := make(map[fleet.DeviceID]fleet.Lease, len(leases))
	for _, l := range leases {
		held[l.Device] = l
	}
	return held, nil
}

// openLease gives a device to a placed run and writes the ledger's open fact. The database refuses a second open lease of the device,
// and one of its parent or parts.
func (t *tx) openLease(device fleet.DeviceID, p *placing) error {
	result, err := t.session.exec(t.ctx, `INSERT INTO lease (device, workspace, epoch, host, user, project, pool, model, started_at)
		SELECT ?, ?, ?, ?, ?, ?, ?, model, ? FROM device WHERE id = ?`,
		device, p.key.Workspace, p.key.Epoch, p.host, p.owner, p.project, p.pool, t.now, device)
	if isConstraint(err) {
		return fleet.Wrap(err, fleet.KindConflict, "device %s, its whole or a part of it is leased", device)
	}
	if err != nil {
		return fmt.Errorf("lease %s: %w", device, err)
	}
	id, err := result.LastInsertId()
	if err != nil {
		return err
	}
	return t.addFact(fleet.LeaseID(id), fleet.FactOpen, t.now)
}

// endLeases ends and releases a run's open leases. The end as observed is clamped to [start, now] and is never moved afterwards: a
// lease that has an end is left as it is.
func (t *tx) endLeases(key fleet.RunKey, ended time.Time) (int, error) {
	leases, err := all(t, scanInt[fleet.LeaseID], `SELECT id FROM lease WHERE workspace = ? AND epoch = ? AND released_at IS NULL ORDER BY id`, key.Workspace, key.Epoch)
	if err != nil {
		return 0, err
	}
	for _, id := range leases {
		var at int64
		err := t.row(`UPDATE lease SET ended_at = min(max(?1, started_at), ?2), released_at = ?2 WHERE id = ?3 RETURNING ended_at`, t.orNow(ended), t.now, id).Scan(&at)
		if err != nil {
			return 0, fmt.Errorf("end lease %d: %w", id, err)
		}
		if err := t.addFact(id, fleet.FactEnd, at); err != nil {
			return 0, err
		}
		if err := t.cutActivity(id, at); err != nil {
			return 0, err
		}
	}
	return len(leases), nil
}
