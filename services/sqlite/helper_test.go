package sqlite_test

import (
	"database/sql"

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
