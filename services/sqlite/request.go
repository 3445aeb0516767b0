package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Ordered returns the workspace of an order that was carried out under this name within the last 24 h. KindExists when the name was used
// for another order.
func (db *DB) Ordered(ctx context.Context, id fleet.OrderID, now time.Time) (w fleet.Workspace, found bool, err error) {
	err = db.read(ctx, func(t *tx) error {
		w, found, err = t.ordered(id, millis(now))
		return err
	})
	return w, found, err
}

func (t *tx) ordered(id fleet.OrderID, now int64) (w fleet.Workspace, found bool, err error) {
	if id.ID == "" {
		return w, false, nil
	}
	var fingerprint string
	var workspace fleet.WorkspaceID
	err = t.row(`SELECT fingerprint, workspace FROM request WHERE owner = ? AND request_id = ? AND created_at > ?`, id.Actor, id.ID, now-t.db.opts.RequestTTL.Milliseconds()).
		Scan(&fingerprint, &workspace)
	if isNoRows(err) {
		return w, false, nil
	}
	if err != nil {
		return w, false, err
	}
	if fingerprint != id.Fingerprint {
		return w, false, fleet.Errorf(fleet.KindExists, "request id %q was used for another request; draw a new one", clip(id.ID))
	}
	w, err = t.workspace(workspace)
	return w, err == nil, err
}

// noteOrder remembers that an order was carried out, in its own transaction, and forgets those that are too old.
func (t *tx) noteOrder(id fleet.OrderID, workspace fleet.WorkspaceID) error {
	if id.ID == "" {
		return nil
	}
	if err := t.exec(`DELETE FROM request WHERE created_at <= ?`, t.now-t.db.opts.RequestTTL.Milliseconds()); err != nil {
		return err
	}
	return t.exec(`INSERT INTO request (owner, request_id, fingerprint, workspace, created_at) VALUES (?, ?, ?, ?, ?)`, id.Actor, id.ID, id.Fingerprint, workspace, t.now)
}
