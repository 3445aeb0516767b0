package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Fence declares a host lost: its runs count as gone, and their leases end at the last moment at which the host was seen and are
// released. It takes no runs until it has answered again and holds nothing of them. Returns how many leases ended.
func (db *DB) Fence(ctx context.Context, host fleet.HostID, reason string, now time.Time) (ended int, changes fleet.Changes, err error) {
	err = db.record(ctx, now, func(t *tx) error {
		ended, changes = 0, fleet.Changes{}
		h, err := t.host(host)
		if err != nil {
			return err
		}
		if err := t.exec(`UPDATE host SET fenced = 1, generation = generation + 1 WHERE id = ?`, host); err != nil {
			return err
		}
		changes.Hosts = []fleet.HostID{host}
		keys, err := all(t, scanWith(func(k *fleet.RunKey) []any { return []any{&k.Workspace, &k.Epoch} }),
			`SELECT workspace, epoch FROM run WHERE host = ? AND gone_at IS NULL ORDER BY workspace`, host)
		if err != nil {
			return err
		}
		for _, key := range keys {
			n, err := t.finishRun(key, h.LastSeen)
			if err != nil {
				return err
			}
			ended += n
			if err := t.loseRun(key, &h, reason, &changes); err != nil {
				return err
			}
		}
		changes.Freed = len(keys) > 0
		return nil
	})
	return ended, changes, err
}

// loseRun makes what a workspace's goal says of a run that was lost with its host.
func (t *tx) loseRun(key fleet.RunKey, h *fleet.Host, reason string, changes *fleet.Changes) error {
	w, err := t.workspace(key.Workspace)
	if isDamaged(err) {
		t.db.log.Error("a workspace's record cannot be read", "workspace", key.Workspace, "error", err)
		return nil
	}
	if err != nil {
		return err
	}
	before := w
	w.Reason = fleet.Reason{Code: "host_lost", Message: "host " + h.Name + " was declared lost: " + reason + "; start the workspace again, or restore its volume"}
	w.Restart = false
	switch w.Goal {
	case fleet.GoalDeleted:
		if err := t.deleteWorkspace(&w); err != nil {
			return err
		}
	case fleet.GoalStopped:
		w.State = fleet.StateStopped
	case fleet.GoalRunning:
		w.State, w.Goal = fleet.StateFailed, fleet.GoalStopped
	}
	changes.Workspaces = append(changes.Workspaces, w.ID)
	return t.storeWorkspace(&before, &w)
}
