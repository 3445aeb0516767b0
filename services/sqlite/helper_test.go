package sqlite_test

import (
	"context"
	"database/sql"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

func deviceFilter(host fleet.HostID) sqlite.DeviceFilter { return sqlite.DeviceFilter{Host: host} }

// raw is a second connection to the file, as an admin's sqlite3 would be.
func (r *room) raw() *sql.DB {
	r.t.Helper()
	db, err := sql.Open("sqlite", r.Path())
	r.ok(err)
	db.SetMaxOpenConns(1)
	_, err = db.Exec(`PRAGMA busy_timeout = 5000`)
	r.ok(err)
	r.t.Cleanup(func() { _ = db.Close() })
	return db
}

// copyOf is a room on a copy of a file.
func (r *room) copyOf(t *testing.T, path string) *room {
	t.Helper()
	content, err := os.ReadFile(path)
	r.ok(err)
	dir, err := os.MkdirTemp("", "carrel")
	r.ok(err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	name := filepath.Join(dir, "carrel.db")
	r.ok(os.WriteFile(name, content, 0o600))
	db, err := sqlite.Open(context.Background(), sqlite.Options{Path: name, BallastMiB: -1})
	r.ok(err)
	return &room{DB: db, t: t, now: r.now, ana: r.ana, bo: r.bo, h1: r.h1, h2: r.h2, session: maps.Clone(r.session), seq: maps.Clone(r.seq)}
}
