package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// TestWriteFixture makes testdata/0001_data.sql anew when CARREL_WRITE_FIXTURE is set: the rows of one of each noun, as text. It was run
// once for schema 1, which is frozen with its release.
func TestWriteFixture(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.ok(r.CreateProject(ctx, fleet.Project{Name: "vision"}, r.now))
	w := r.create(r.ana, "fraud", 1, data(false))
	r.ready(w, r.h1.ID, "G0")
	busy := 70
	for range 10 {
		r.now = r.now.Add(10 * time.Second)
		r.ok(r.RecordSamples(ctx, r.h1.ID, []fleet.Sample{{Device: "G0", At: r.now, UtilizationPercent: &busy}}, 10*time.Second, r.now))
	}
	_, err := r.ChangeProject(ctx, w.ID, "vision", r.now)
	r.ok(err)
	w2 := r.create(r.bo, "notes", 1)
	key := r.ready(w2, r.h1.ID, "G1")
	r.now = r.now.Add(time.Minute)
	r.gone(key, r.now)
	r.create(r.bo, "later", 4)
	r.checked()
	text := dump(t, r)
	for _, table := range []string{"workspace", "run", "lease", "ledger", "volume", "mount", "lease_activity", "event", "device"} {
		if !strings.Contains(text, " INTO "+table+" ") {
			t.Errorf("the dump has no %s", table)
		}
	}
	if os.Getenv("CARREL_WRITE_FIXTURE") != "" {
		r.ok(os.WriteFile("testdata/0001_data.sql", []byte(text), 0o644))
	}
}

func dump(t *testing.T, r *room) string {
	t.Helper()
	raw := r.raw()
	var out strings.Builder
	out.WriteString("PRAGMA foreign_keys = 0;\n")
	for _, table := range []string{"meta", "project", "user", "project_member", "pool", "host", "device", "volume", "workspace", "run", "mount", "lease", "ledger", "lease_activity", "lease_total", "event"} {
		var columns string
		r.ok(raw.QueryRow(`SELECT group_concat(quote(name), ', ') FROM pragma_table_info('` + table + `')`).Scan(&columns))
		columns = strings.ReplaceAll(columns, "'", "")
		quoted := "quote(" + strings.ReplaceAll(columns, ", ", ") || ', ' || quote(") + ")"
		for _, values := range texts(r, raw, `SELECT `+quoted+` FROM `+table) {
			fmt.Fprintf(&out, "INSERT OR REPLACE INTO %s (%s) VALUES (%s);\n", table, columns, values)
		}
	}
	return strings.ReplaceAll(out.String(), "INSERT OR REPLACE INTO ledger ", "INSERT INTO ledger ")
}

// texts is the one column of a query's rows.
func texts(r *room, raw *sql.DB, query string) (all []string) {
	rows, err := raw.Query(query)
	r.ok(err)
	defer rows.Close()
	for rows.Next() {
		var text string
		r.ok(rows.Scan(&text))
		all = append(all, text)
	}
	r.ok(rows.Err())
	return all
}
