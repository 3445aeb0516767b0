package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// QueueRun queues a new run of a stopped or failed workspace; a live one is returned as it is, and one that is stopping starts again,
// from the queue, once it is gone. An order that was carried out before does nothing. KindConflict while it is being deleted, or when a
// volume of it is no longer there.
func (db *DB) QueueRun(ctx context.Context, order fleet.StartOrder, now time.Time) (w fleet.Workspace, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		var done bool
		if w, done, err = t.ordered(order.Order, t.now); err != nil || done {
			return err
		}
		if w, err = t.workspace(order.Workspace); err != nil {
			return err
		}
		before := w
		if err := t.startAgain(&w); err != nil {
			return err
		}
		if err := t.noteOrder(order.Order, w.ID); err != nil || w.Goal == before.Goal && w.State == before.State {
			return err
		}
		return t.storeWorkspace(&before, &w)
	})
	return w, err
}

// startAgain makes a workspace's goal running, and queues a run when none is there.
func (t *tx) startAgain(w *fleet.Workspace) error {
	switch {
	case w.State == fleet.StateDeleted:
		return fleet.Errorf(fleet.KindNotFound, "workspace %s was deleted", w.Name)
	case w.Goal == fleet.GoalDeleted:
		return fleet.Errorf(fleet.KindConflict, "workspace %s is being deleted", w.Name)
	case w.State == fleet.StateStopping:
		w.Goal = fleet.GoalRunning
		return nil
	case w.State.Live():
		return nil
	}
	return t.queueRun(w, t.now, refuseMissing)
}

// Stop records a StopOrder. A queued run ends at once; a stopped workspace with GoalDeleted is deleted at once. It is idempotent, and
// what is being deleted stays so; an order that was carried out before does nothing.
func (db *DB) Stop(ctx context.Context, order fleet.StopOrder, now time.Time) (w fleet.Workspace, changes fleet.Changes, err error) {
	err = db.record(ctx, now, func(t *tx) error {
		changes = fleet.Changes{}
		var done bool
		if w, done, err = t.ordered(order.Order, t.now); err != nil || done {
			return err
		}
		if w, err = t.workspace(order.Workspace); err != nil {
			return err
		}
		before := w
		if err := t.stop(&w, &order, &changes); err != nil {
			return err
		}
		if err := t.noteOrder(order.Order, w.ID); err != nil {
			return err
		}
		if jsonArg(before) == jsonArg(w) {
			return nil
		}
		changes.Workspaces = append(changes.Workspaces, w.ID)
		return t.storeWorkspace(&before, &w)
	})
	return w, changes, err
}

func (t *tx) stop(w *fleet.Workspace, order *fleet.StopOrder, changes *fleet.Changes) error {
	if order.Refused != 0 {
		if w.State != fleet.StateQueued || w.Epoch != order.Refused {
			return nil
		}
		return t.stopQueued(w, order, changes)
	}
	if settled, err := settledByDelete(w, order); settled || err != nil {
		return err
	}
	if order.Spec != nil {
		if err := t.setPending(w, *order.Spec, w.Origins); err != nil {
			return err
		}
	}
	w.DropHome = w.DropHome || (order.DropHome && order.Goal == fleet.GoalDeleted)
	switch {
	case w.State == fleet.StateQueued:
		return t.stopQueued(w, order, changes)
	case w.State.Live():
		return t.stopPlaced(w, order, changes)
	case order.Restart:
		return t.startAgain(w)
	}
	w.Goal = order.Goal
	if order.Goal == fleet.GoalDeleted {
		return t.deleteWorkspace(w)
	}
	return nil
}

// settledByDelete reports whether a delete, carried out or under way, leaves an order nothing to do.
func settledByDelete(w *fleet.Workspace, order *fleet.StopOrder) (bool, error) {
	switch {
	case w.State == fleet.StateDeleted && order.Goal != fleet.GoalDeleted:
		return true, fleet.Errorf(fleet.KindNotFound, "workspace %s was deleted", w.Name)
	case w.State == fleet.StateDeleted:
		return true, nil
	case w.Goal != fleet.GoalDeleted || order.Goal == fleet.GoalDeleted:
		return false, nil
	case order.Restart:
		return true, fleet.Errorf(fleet.KindConflict, "workspace %s is being deleted", w.Name)
	default:
		return true, nil
	}
}

// stopQueued ends a run that waits. A restart of it is nothing to do.
func (t *tx) stopQueued(w *fleet.Workspace, order *fleet.StopOrder, changes *fleet.Changes) error {
	if order.Restart {
		return nil
	}
	if err := t.dropRun(fleet.RunKey{Workspace: w.ID, Epoch: w.Epoch}, order.Reason); err != nil {
		return err
	}
	changes.Freed = true // a reservation or a place in the queue
	w.State, w.Goal, w.Restart, w.Reason = fleet.StateStopped, order.Goal, false, order.Reason
	if order.Refused != 0 {
		w.State = fleet.StateFailed
	}
	if order.Goal == fleet.GoalDeleted {
		return t.deleteWorkspace(w)
	}
	return nil
}

// stopPlaced asks the host of a run to end it.
func (t *tx) stopPlaced(w *fleet.Workspace, order *fleet.StopOrder, changes *fleet.Changes) error {
	already := w.State == fleet.StateStopping
	w.Goal, w.Restart = order.Goal, order.Restart
	if order.Restart {
		w.Goal = fleet.GoalRunning
	}
	w.State = fleet.StateStopping
	if !already || order.Reason.Code != "" {
		w.Reason = order.Reason
	}
	var host fleet.HostID
	err := t.row(`UPDATE run SET goal = 'stopped', goal_reason = CASE WHEN ?1 = '' THEN goal_reason ELSE ?1 END, stop_grace_ms = CASE WHEN ?2 > 0 THEN ?2 ELSE stop_grace_ms END
		WHERE workspace = ?3 AND epoch = ?4 RETURNING host`, order.Reason.Message, order.Grace.Milliseconds(), w.ID, w.Epoch).Scan(textInto[fleet.HostID]{&host})
	if err != nil {
		return err
	}
	changes.Hosts = append(changes.Hosts, host)
	return t.bumpHost(host)
}

// deleteWorkspace makes a workspace without a run deleted; the caller stores it. Its home goes too where that was asked for and no
// one else uses it, to be restored for fleet.VolumeRetention; all other volumes stay.
func (t *tx) deleteWorkspace(w *fleet.Workspace) error {
	w.State, w.Goal, w.Restart, w.DeletedAt = fleet.StateDeleted, fleet.GoalDeleted, false, fromMillis(t.now)
	if !w.DropHome {
		return nil
	}
	home, _, err := t.home(w.ID)
	if err != nil || home.volume == "" {
		return err
	}
	return t.exec(`UPDATE volume SET deleted_at = ?1 WHERE owner = ?2 AND name = ?3 AND deleted_at IS NULL AND NOT EXISTS (
		SELECT 1 FROM mount JOIN workspace ON workspace.id = mount.workspace WHERE mount.volume = volume.id AND workspace.id <> ?4
		AND (mount.live = 1 OR (mount.epoch = workspace.epoch AND workspace.state <> 'deleted')))`, t.now, w.Owner, home.volume, w.ID)
}

// ChangeSpec records what the next run gets; a run that waits, or a workspace without a run, gets it at once. KindConflict when the
// version moved on.
func (db *DB) ChangeSpec(ctx context.Context, change fleet.SpecChange, now time.Time) (w fleet.Workspace, err error) {
	err = db.write(ctx, now, func(t *tx) error {
		if w, err = t.workspace(change.Workspace); err != nil {
			return err
		}
		before := w
		switch {
		case w.State == fleet.StateDeleted:
			return fleet.Errorf(fleet.KindNotFound, "workspace %s was deleted", w.Name)
		case change.IfVersion != 0 && change.IfVersion != w.Version:
			return fleet.Errorf(fleet.KindConflict, "workspace %s was changed by someone else meanwhile; look at it again", w.Name)
		}
		if err := t.setPending(&w, change.Spec, change.Origins); err != nil {
			return err
		}
		return t.storeWorkspace(&before, &w)
	})
	return w, err
}

// setPending makes the next run's spec, with its volumes, and the present one where nothing runs yet.
func (t *tx) setPending(w *fleet.Workspace, spec fleet.Spec, origins map[string]string) error {
	w.Pending = spec
	if origins != nil {
		w.Origins = origins
	}
	for _, use := range spec.Volumes {
		if _, _, err := t.resolveVolume(w, use, makeMissing); err != nil {
			return err
		}
	}
	if w.State.Placed() {
		return nil
	}
	w.Spec = spec
	if w.State != fleet.StateQueued {
		return nil
	}
	home, _, err := t.home(w.ID)
	if err != nil {
		return err
	}
	err = t.exec(`UPDATE run SET gpus = ?, image_digest = ? WHERE workspace = ? AND epoch = ?`, spec.GPU.Count, spec.ImageDigest, w.ID, w.Epoch)
	if err != nil {
		return err
	}
	return t.layMounts(w, w.Epoch, home, &spec, makeMissing)
}
