package sqlite

import (
	"context"
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// CreateWorkspace records a workspace, finds or makes its volumes, and queues its first run when asked. KindExists when the name is
// taken or the request id was used for something else; replay is true when the request id's first answer is returned.
func (db *DB) CreateWorkspace(ctx context.Context, order fleet.NewWorkspace, now time.Time) (w fleet.Workspace, replay bool, err error) {
	id := fleet.OrderID{Actor: order.Workspace.Owner, ID: order.RequestID, Fingerprint: order.Fingerprint}
	err = db.write(ctx, now, func(t *tx) error {
		w, replay, err = t.ordered(id, t.now)
		if err != nil || replay {
			return err
		}
		if w, err = t.createWorkspace(&order); err != nil {
			return err
		}
		return t.noteOrder(id, w.ID)
	})
	return w, replay, err
}

func (t *tx) createWorkspace(order *fleet.NewWorkspace) (fleet.Workspace, error) {
	w := order.Workspace
	owner, err := t.user(w.Owner)
	if err != nil {
		return w, err
	}
	if w.Project == "" {
		w.Project = owner.Project
	}
	if err := t.needProject(w.Project); err != nil {
		return w, err
	}
	if w.ID == "" {
		id, err := t.newID()
		if err != nil {
			return w, err
		}
		w.ID = fleet.WorkspaceID(id)
	}
	if err := t.settleHome(order, &w); err != nil {
		return w, err
	}
	w.OwnerName, w.CreatedAt, w.Version, w.Epoch, w.DeletedAt = owner.Name, fromMillis(t.now), 1, 0, time.Time{}
	w.State, w.Goal, w.Pending = fleet.StateStopped, fleet.GoalStopped, w.Spec
	if err := t.insertWorkspace(order, &w); err != nil {
		return w, err
	}
	if err := t.checkCount(order); err != nil {
		return w, err
	}
	before := w
	if order.Queue {
		err = t.queueRun(&w, t.now, makeMissing)
	} else {
		err = t.layMounts(&w, 0, homeMount{order.HomeVolume, order.HomeTarget}, &w.Spec, makeMissing)
	}
	if err != nil {
		return w, err
	}
	if err := t.storeWorkspace(&before, &w); err != nil {
		return w, err
	}
	return t.workspace(w.ID)
}

// checkCount holds the owner's workspaces, the new one among them, against the limit.
func (t *tx) checkCount(order *fleet.NewWorkspace) error {
	if order.MostOfOwner <= 0 {
		return nil
	}
	var count int
	err := t.row(`SELECT count(*) FROM workspace WHERE owner = ? AND state <> 'deleted'`, order.Workspace.Owner).Scan(&count)
	if err == nil && count > order.MostOfOwner {
		return fleet.WorkspaceLimit(count-1, order.MostOfOwner)
	}
	return err
}

// settleHome renames a kept home away where a fresh one is wanted, and else notes that it is taken again.
func (t *tx) settleHome(order *fleet.NewWorkspace, w *fleet.Workspace) error {
	if order.HomeVolume == "" {
		return nil
	}
	if order.FreshHome {
		return t.renameAway(w.Owner, order.HomeVolume)
	}
	v, err := t.volumeByName(w.Owner, order.HomeVolume)
	if isNoRows(err) {
		return nil
	}
	w.ReusedVol = v.Name
	return err
}

func (t *tx) insertWorkspace(order *fleet.NewWorkspace, w *fleet.Workspace) error {
	hostKey := w.HostKey
	if hostKey == nil {
		hostKey = []byte{}
	}
	err := t.exec(`INSERT INTO workspace (id, name, owner, project, spec, pending, origins, goal, state, reason, epoch, epoch_floor, created_at, version, restart, drop_home,
		sudo, reused_volume, host_key, home_volume, home_target, stop_grace_ms) VALUES (?, ?, ?, ?, ?, '', ?, ?, ?, '{}', 0, 0, ?, 1, 0, 0, '', ?, ?, ?, ?, ?)`,
		w.ID, w.Name, w.Owner, w.Project, jsonArg(w.Spec), jsonArg(w.Origins), w.Goal, w.State, t.now, w.ReusedVol, hostKey,
		order.HomeVolume, order.HomeTarget, order.StopGrace.Milliseconds())
	if !isUnique(err) {
		return err
	}
	var goal fleet.Goal
	if err := t.row(`SELECT goal FROM workspace WHERE owner = ? AND name = ? AND state <> 'deleted'`, w.Owner, w.Name).Scan(&goal); err != nil {
		return fmt.Errorf("workspace id %s is taken: %w", w.ID, err)
	}
	if goal == fleet.GoalDeleted {
		return fleet.Errorf(fleet.KindExists, "workspace %s is still being deleted; try again when it is gone", w.Name)
	}
	return fleet.Errorf(fleet.KindExists, "there is a workspace %s already; `carrel up %s` starts it", w.Name, w.Name)
}
