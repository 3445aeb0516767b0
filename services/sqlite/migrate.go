package sqlite

import (
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

//go:embed migrations/*.sql
var migrationFiles embed.FS

func embedded() fs.FS {
	sub, err := fs.Sub(migrationFiles, "migrations")
	if err != nil {
		panic(err) // the directory is part of the program
	}
	return sub
}

type migration struct {
	version int
	name    string
	text    string
}

// migrate brings the file to this program's schema, one transaction per step, after a copy of a file that holds something.
func migrate(ctx context.Context, conn *sql.Conn, opts Options) error {
	steps, err := readMigrations(opts.migrations)
	if err != nil {
		return err
	}
	have, err := schemaVersion(ctx, conn)
	if err != nil {
		return err
	}
	want := steps[len(steps)-1].version
	if have > want {
		return fleet.Errorf(fleet.KindConflict, "the database has schema %d and this program knows up to %d; start the newer carreld that wrote it, or restore the copy made before its upgrade", have, want)
	}
	if have == want {
		return nil
	}
	if have > 0 {
		if err := copyBefore(ctx, conn, opts, have, want); err != nil {
			return err
		}
	}
	for _, step := range steps {
		if step.version <= have {
			continue
		}
		if err := applyMigration(ctx, conn, step); err != nil {
			return fmt.Errorf("migrate to schema %s: %w", step.name, explain(err))
		}
		opts.Log.Info("database migrated", "schema", step.name)
	}
	return nil
}

func readMigrations(files fs.FS) ([]migration, error) {
	names, err := fs.Glob(files, "*.sql") // sorted
	if err != nil {
		return nil, err
	}
	steps := make([]migration, 0, len(names))
	for i, name := range names {
		number, _, _ := strings.Cut(name, "_")
		version, err := strconv.Atoi(number)
		if err != nil || version != i+1 {
			return nil, fmt.Errorf("migration %s: numbers must begin at 0001 and leave no gap", name)
		}
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, err
		}
		steps = append(steps, migration{version: version, name: strings.TrimSuffix(name, ".sql"), text: string(text)})
	}
	if len(steps) == 0 {
		return nil, fmt.Errorf("no migrations")
	}
	return steps, nil
}

// schemaVersion is 0 for an empty file. A file that has tables but not ours is refused.
func schemaVersion(ctx context.Context, conn *sql.Conn) (int, error) {
	var tables, ours int
	err := conn.QueryRowContext(ctx, `SELECT count(*), count(*) FILTER (WHERE name = 'schema_version') FROM sqlite_schema WHERE type = 'table'`).Scan(&tables, &ours)
	if err != nil {
		return 0, explain(err)
	}
	if tables == 0 {
		return 0, nil
	}
	if ours == 0 {
		return 0, fleet.Errorf(fleet.KindConflict, "the file is a database of another program; give the gateway a path of its own")
	}
	var version int
	if err := conn.QueryRowContext(ctx, `SELECT coalesce(max(version), 0) FROM schema_version`).Scan(&version); err != nil {
		return 0, explain(err)
	}
	return version, nil
}

func copyBefore(ctx context.Context, conn *sql.Conn, opts Options, have, want int) error {
	path := fmt.Sprintf("%s.before-%04d", opts.Path, want)
	for n := 2; ; n++ {
		if _, err := os.Lstat(path); err != nil {
			break
		}
		path = fmt.Sprintf("%s.before-%04d.%d", opts.Path, want, n)
	}
	if err := vacuumInto(ctx, conn, path); err != nil {
		return fleet.Wrap(err, fleet.KindUnavailable, "the database has to be migrated from schema %d to %d, and the copy of it before that failed; make room beside it", have, want)
	}
	opts.Log.Info("database copied before migration", "copy", path, "from", have, "to", want)
	return nil
}

func applyMigration(ctx context.Context, conn *sql.Conn, step migration) (err error) {
	if _, err := conn.ExecContext(ctx, "BEGIN IMMEDIATE"); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_, _ = conn.ExecContext(context.WithoutCancel(ctx), "ROLLBACK") // the first error is the one to tell
		}
	}()
	const table = `CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL PRIMARY KEY, name TEXT NOT NULL) STRICT`
	if _, err := conn.ExecContext(ctx, table); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, step.text); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, `INSERT INTO schema_version (version, name) VALUES (?, ?)`, step.version, step.name); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, "COMMIT")
	return err
}
