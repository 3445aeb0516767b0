package sqlite

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

const workspaceColumns = `workspace.id, workspace.name, workspace.owner, owner.name, workspace.project, workspace.spec, workspace.pending, workspace.origins,
	workspace.goal, workspace.state, workspace.reason, workspace.epoch, workspace.created_at, workspace.deleted_at, workspace.version,
	workspace.restart, workspace.drop_home, workspace.sudo, workspace.reused_volume, workspace.host_key`

const workspaceQuery = `SELECT ` + workspaceColumns + ` FROM workspace JOIN user AS owner ON owner.id = workspace.owner`

func workspaceInto(w *fleet.Workspace) []any {
	return []any{
		&w.ID, &w.Name, &w.Owner, &w.OwnerName, &w.Project,
		jsonInto{&w.Spec},
		pendingInto{w},
		jsonInto{&w.Origins},
		&w.Goal,
		stateInto{&w.State},
		jsonInto{&w.Reason},
		&w.Epoch,
		timeInto{&w.CreatedAt},
		timeInto{&w.DeletedAt},
		&w.Version,
		&w.Restart, &w.DropHome, &w.Sudo, &w.ReusedVol, &w.HostKey,
	}
}

func scanWorkspace(s scanner) (fleet.Workspace, error) { return scanWith(workspaceInto)(s) }

// pendingInto scans the spec of the next run; empty text means that it is the present one, which was scanned before.
type pendingInto struct{ w *fleet.Workspace }

// Scan decodes JSON text.
func (v pendingInto) Scan(src any) error {
	if text, ok := src.(string); ok && text == "" {
		v.w.Pending = v.w.Spec
		return nil
	}
	return jsonInto{&v.w.Pending}.Scan(src)
}

// stateInto scans a state and refuses one that this program does not know.
type stateInto struct{ to *fleet.State }

// Scan takes text.
func (v stateInto) Scan(src any) error {
	text, _ := src.(string)
	if !slices.Contains(fleet.States(), fleet.State(text)) {
		return &damagedError{fmt.Errorf("unknown state %q", text)}
	}
	*v.to = fleet.State(text)
	return nil
}

// pendingArg is the next run's spec as stored.
func pendingArg(spec, pending *fleet.Spec) string {
	if s, p := jsonArg(spec), jsonArg(pending); s != p {
		return p
	}
	return ""
}

// Workspace returns one by id, also a deleted one. KindNotFound.
func (db *DB) Workspace(ctx context.Context, id fleet.WorkspaceID) (w fleet.Workspace, err error) {
	err = db.read(ctx, func(t *tx) error {
		w, err = t.workspace(id)
		return err
	})
	return w, err
}

func (t *tx) workspace(id fleet.WorkspaceID) (fleet.Workspace, error) {
	w, err := scanWorkspace(t.row(workspaceQuery+` WHERE workspace.id = ?`, id))
	if isNoRows(err) {
		return w, fleet.Errorf(fleet.KindNotFound, "there is no workspace with id %s", clip(string(id)))
	}
	if isDamaged(err) {
		return w, fleet.Wrap(err, fleet.KindInternal, "the record of workspace %s cannot be read; an admin finds it with `carrel doctor`", id)
	}
	return w, err
}

// FindWorkspace returns an owner's workspace that is not deleted by id, name or unique prefix of a name. KindNotFound; KindInvalid lists
// the names that an ambiguous prefix begins.
func (db *DB) FindWorkspace(ctx context.Context, owner fleet.UserID, ref string) (w fleet.Workspace, err error) {
	if ref == "" {
		return w, fleet.Errorf(fleet.KindInvalid, "name a workspace; `carrel ls` shows yours")
	}
	err = db.read(ctx, func(t *tx) error {
		type found struct {
			id   fleet.WorkspaceID
			name string
		}
		matches, err := all(t, scanWith(func(f *found) []any { return []any{&f.id, &f.name} }),
			`SELECT id, name FROM workspace WHERE owner = ?1 AND state <> 'deleted' AND (id = ?2 OR substr(name, 1, length(?2)) = ?2) ORDER BY name`, owner, ref)
		if err != nil {
			return err
		}
		for _, m := range matches {
			if m.name == ref || (string(m.id) == ref && !slices.ContainsFunc(matches, func(f found) bool { return f.name == ref })) {
				w, err = t.workspace(m.id)
				return err
			}
		}
		switch len(matches) {
		case 0:
			return fleet.Errorf(fleet.KindNotFound, "there is no workspace %q; `carrel ls` shows yours", clip(ref))
		case 1:
			w, err = t.workspace(matches[0].id)
			return err
		}
		names := make([]string, 0, len(matches))
		for _, m := range matches {
			names = append(names, m.name)
		}
		return fleet.Errorf(fleet.KindInvalid, "%q begins the names of %s; write more of the one you mean", clip(ref), list(names))
	})
	return w, err
}

// Workspaces returns a page by owner's name, then name, and where the next begins. Rows that cannot be read are left out; Damaged lists them.
func (db *DB) Workspaces(ctx context.Context, filter fleet.WorkspaceFilter) (page []fleet.Workspace, next string, err error) {
	limit := pageSize(filter.Limit)
	var after [3]string // owner name, name, id
	if filter.After != "" {
		if err := json.Unmarshal([]byte(filter.After), &after); err != nil {
			return nil, "", fleet.Errorf(fleet.KindInvalid, "the page token is not one of ours; begin with the first page")
		}
	}
	err = db.read(ctx, func(t *tx) error {
		rows := 0
		var last [3]string
		err := each(t, func(s scanner) error {
			rows++
			if rows > limit {
				next = jsonArg(last)
				return nil
			}
			var w fleet.Workspace
			err := s.Scan(append([]any{&last[0], &last[1], &last[2]}, workspaceInto(&w)...)...)
			if isDamaged(err) {
				db.log.Error("a workspace's record cannot be read", "workspace", last[2], "error", err)
				return nil
			}
			if err == nil {
				page = append(page, w)
			}
			return err
		}, `SELECT owner.name, workspace.name, workspace.id, `+workspaceColumns+` FROM workspace JOIN user AS owner ON owner.id = workspace.owner
			WHERE (?1 = '' OR workspace.owner = ?1) AND (?2 OR workspace.state <> 'deleted') AND (owner.name, workspace.name, workspace.id) > (?3, ?4, ?5)
			ORDER BY owner.name, workspace.name, workspace.id LIMIT ?6`, filter.Owner, filter.IncludeDeleted, after[0], after[1], after[2], limit+1)
		return err
	})
	return page, next, err
}

// storeWorkspace bumps a workspace's version, stores its moving parts and notes a step of its state as an event.
func (t *tx) storeWorkspace(before, w *fleet.Workspace) error {
	w.Version = before.Version + 1
	err := t.exec(`UPDATE workspace SET project = ?, spec = ?, pending = ?, origins = ?, goal = ?, state = ?, reason = ?, epoch = ?, deleted_at = ?, version = ?,
		restart = ?, drop_home = ?, sudo = ?, reused_volume = ? WHERE id = ?`,
		w.Project, jsonArg(w.Spec), pendingArg(&w.Spec, &w.Pending), jsonArg(w.Origins), w.Goal, w.State, jsonArg(w.Reason), w.Epoch, timeArg(w.DeletedAt), w.Version,
		w.Restart, w.DropHome, w.Sudo, w.ReusedVol, w.ID)
	if err != nil {
		return fmt.Errorf("store workspace %s: %w", w.ID, err)
	}
	if before.State == w.State && before.Reason.Code == w.Reason.Code && before.Reason.Message == w.Reason.Message {
		return nil
	}
	return t.addEvent(Event{Workspace: w.ID, Epoch: w.Epoch, State: w.State, Code: w.Reason.Code, Message: eventText(w)})
}

func eventText(w *fleet.Workspace) string {
	if w.Reason.Message != "" {
		return w.Reason.Message
	}
	return strings.TrimSpace("workspace is " + string(w.State))
}

// DamagedRow is a record that this program cannot understand; others are not affected by it.
type DamagedRow struct {
	Table string
	ID    string
	Err   error
}

// Damaged lists the records of workspaces, runs and hosts that cannot be read, for an admin.
func (db *DB) Damaged(ctx context.Context) (rows []DamagedRow, err error) {
	err = db.read(ctx, func(t *tx) error {
		rows = nil
		for _, kind := range []struct {
			table, query string
			dest         func() []any
		}{
			{"workspace", `SELECT workspace.id, ` + workspaceColumns + ` FROM workspace JOIN user AS owner ON owner.id = workspace.owner`, func() []any { return workspaceInto(new(fleet.Workspace)) }},
			{"run", `SELECT run.workspace || '-' || run.epoch, ` + runColumns + ` FROM run`, func() []any { return runInto(new(fleet.Run)) }},
			{"user", `SELECT user.id, ` + userColumns + ` FROM user`, func() []any { return userInto(new(fleet.User)) }},
		} {
			err := each(t, func(s scanner) error {
				var id string
				if err := s.Scan(append([]any{&id}, kind.dest()...)...); err != nil {
					rows = append(rows, DamagedRow{Table: kind.table, ID: id, Err: err})
				}
				return nil
			}, kind.query)
			if err != nil {
				return err
			}
		}
		return nil
	})
	return rows, err
}
