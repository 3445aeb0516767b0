package sqlite

import (
	"context"

	"github.com/carrel-dev/carrel/services/fleet"
)

// mostLeasesShown bounds the leases of a view.
const mostLeasesShown = 100

// View returns a workspace with what stands around it. KindNotFound.
func (db *DB) View(ctx context.Context, id fleet.WorkspaceID) (v fleet.WorkspaceView, err error) {
	err = db.read(ctx, func(t *tx) error {
		if _, err := t.workspace(id); err != nil {
			return err
		}
		views, err := t.views([]fleet.WorkspaceID{id})
		if err == nil && len(views) == 1 {
			v = views[0]
		}
		return err
	})
	return v, err
}

// Views returns views in the order of the ids; unknown ones, and ones whose record cannot be read, are left out.
func (db *DB) Views(ctx context.Context, ids []fleet.WorkspaceID) (views []fleet.WorkspaceView, err error) {
	if len(ids) == 0 {
		return nil, nil
	}
	err = db.read(ctx, func(t *tx) error {
		views, err = t.views(ids)
		return err
	})
	return views, err
}

// ofIDs is a condition on workspace ids given as a JSON list.
const ofIDs = ` IN (SELECT value FROM json_each(?1))`

func (t *tx) views(ids []fleet.WorkspaceID) ([]fleet.WorkspaceView, error) {
	wanted := jsonArg(ids)
	found := make(map[fleet.WorkspaceID]*fleet.WorkspaceView, len(ids))
	err := each(t, func(s scanner) error {
		v := &fleet.WorkspaceView{}
		err := s.Scan(append(workspaceInto(&v.Workspace), &v.OwnerLogin)...)
		if isDamaged(err) {
			t.db.log.Error("a workspace's record cannot be read", "workspace", v.Workspace.ID, "error", err)
			return nil
		}
		found[v.Workspace.ID] = v
		return err
	}, `SELECT `+workspaceColumns+`, owner.login FROM workspace JOIN user AS owner ON owner.id = workspace.owner WHERE workspace.id`+ofIDs, wanted)
	if err != nil {
		return nil, err
	}
	for _, fill := range []func(string, map[fleet.WorkspaceID]*fleet.WorkspaceView) error{t.viewRuns, t.viewLeases, t.viewDevices, t.viewMounts} {
		if err := fill(wanted, found); err != nil {
			return nil, err
		}
	}
	views := make([]fleet.WorkspaceView, 0, len(ids))
	for _, id := range ids {
		if v := found[id]; v != nil {
			views = append(views, *v)
		}
	}
	return views, nil
}

func (t *tx) viewRuns(wanted string, found map[fleet.WorkspaceID]*fleet.WorkspaceView) error {
	return each(t, func(s scanner) error {
		var r fleet.Run
		var host string
		err := s.Scan(append(runInto(&r), textInto[string]{&host})...)
		if isDamaged(err) {
			t.db.log.Error("a run's record cannot be read", "workspace", r.Key.Workspace, "epoch", r.Key.Epoch, "error", err)
			return nil
		}
		if v := found[r.Key.Workspace]; v != nil {
			v.Run, v.HostName = r, host
		}
		return err
	}, `SELECT `+runColumns+`, host.name FROM workspace JOIN run ON run.workspace = workspace.id AND run.epoch = workspace.epoch LEFT JOIN host ON host.id = run.host
		WHERE workspace.id`+ofIDs, wanted)
}

// viewLeases puts leases newest first, which brings those of the present run to the front.
func (t *tx) viewLeases(wanted string, found map[fleet.WorkspaceID]*fleet.WorkspaceView) error {
	return each(t, func(s scanner) error {
		var l fleet.Lease
		if err := s.Scan(leaseInto(&l)...); err != nil {
			return err
		}
		v := found[l.Run.Workspace]
		if v == nil {
			return nil
		}
		if l.Run.Epoch == v.Run.Key.Epoch {
			v.Run.Devices = append(v.Run.Devices, l.Device)
		}
		if len(v.Leases) < mostLeasesShown {
			v.Leases = append(v.Leases, l)
		}
		return nil
	}, leaseQuery+` WHERE lease.workspace IN (SELECT value FROM json_each(?2)) ORDER BY lease.epoch DESC, lease.id`, t.silentSince(), wanted)
}

func (t *tx) viewDevices(wanted string, found map[fleet.WorkspaceID]*fleet.WorkspaceView) error {
	return each(t, func(s scanner) error {
		var id fleet.WorkspaceID
		var d fleet.Device
		err := s.Scan(append([]any{&id}, deviceInto(&d)...)...)
		if v := found[id]; v != nil && err == nil {
			v.Devices = append(v.Devices, d)
		}
		return err
	}, `SELECT lease.workspace, `+deviceColumns+` FROM lease JOIN device ON device.id = lease.device WHERE lease.released_at IS NULL AND lease.workspace`+ofIDs+` ORDER BY lease.id`, wanted)
}

func (t *tx) viewMounts(wanted string, found map[fleet.WorkspaceID]*fleet.WorkspaceView) error {
	return each(t, func(s scanner) error {
		var id fleet.WorkspaceID
		m, err := t.mount(s, &id)
		if v := found[id]; v != nil && err == nil {
			v.Mounts = append(v.Mounts, m)
		}
		return err
	}, `SELECT mount.workspace, `+mountColumns+` FROM workspace JOIN mount ON mount.workspace = workspace.id AND mount.epoch = workspace.epoch
		WHERE workspace.id`+ofIDs+` ORDER BY mount.workspace, mount.position`, wanted)
}
