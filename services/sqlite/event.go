package sqlite

import (
	"context"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Event is a step in a workspace's life, for its log.
type Event = fleet.Event

// AddEvent appends an event.
func (db *DB) AddEvent(ctx context.Context, e Event) error {
	return db.write(ctx, e.At, func(t *tx) error { return t.addEvent(e) })
}

// pruneEvery spreads the cost of letting go of old events: every so many of all events the one's workspace is looked at.
const pruneEvery = 32

// addEvent appends an event at the transaction's time.
func (t *tx) addEvent(e Event) error {
	result, err := t.session.exec(t.ctx, `INSERT INTO event (workspace, epoch, at, state, code, message) VALUES (?, ?, ?, ?, ?, ?)`, e.Workspace, e.Epoch, t.now, e.State, e.Code, e.Message)
	if err != nil {
		return err
	}
	if id, err := result.LastInsertId(); err != nil || id%pruneEvery != 0 {
		return err
	}
	return t.exec(`DELETE FROM event WHERE workspace = ?1 AND id <= (SELECT id FROM event WHERE workspace = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)`, e.Workspace, t.db.opts.EventsKept)
}

// Events returns a workspace's newest events, oldest of them first; limit 0 means all that are kept.
func (db *DB) Events(ctx context.Context, workspace fleet.WorkspaceID, limit int) (events []Event, err error) {
	if limit <= 0 {
		limit = db.opts.EventsKept
	}
	err = db.read(ctx, func(t *tx) error {
		events, err = all(t, func(s scanner) (e Event, err error) {
			err = s.Scan(&e.Workspace, &e.Epoch, timeInto{&e.At}, &e.State, &e.Code, &e.Message)
			return e, err
		}, `SELECT workspace, epoch, at, state, code, message FROM event WHERE workspace = ? ORDER BY id DESC LIMIT ?`, workspace, limit)
		return err
	})
	slices.Reverse(events)
	return events, err
}

// Audit is who did what.
type Audit struct {
	At      time.Time
	Actor   string
	Verb    string
	Subject string
}

// AddAudit appends to the audit record.
func (db *DB) AddAudit(ctx context.Context, a Audit) error {
	return db.write(ctx, a.At, func(t *tx) error {
		return t.exec(`INSERT INTO audit (at, actor, verb, subject) VALUES (?, ?, ?, ?)`, t.now, a.Actor, a.Verb, a.Subject)
	})
}

// Audits returns the newest rows, newest first.
func (db *DB) Audits(ctx context.Context, limit int) (rows []Audit, err error) {
	err = db.read(ctx, func(t *tx) error {
		rows, err = all(t, scanWith(func(a *Audit) []any { return []any{timeInto{&a.At}, &a.Actor, &a.Verb, &a.Subject} }),
			`SELECT at, actor, verb, subject FROM audit ORDER BY id DESC LIMIT ?`, pageSize(limit))
		return err
	})
	return rows, err
}
