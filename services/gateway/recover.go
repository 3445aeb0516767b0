package gateway

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/carrel-dev/carrel/services/config"
	"github.com/carrel-dev/carrel/services/sqlite"
)

// Recover makes hosts follow a database again that was put back from an older copy. Until then they refuse its orders, which are older
// than what they have seen. The new generation is taken from the time, so that it is above that of every earlier recovery, also of one
// that the copy knows nothing of. KindConflict while a gateway runs.
func Recover(ctx context.Context, cfg config.Config, now time.Time) (generation int64, err error) {
	db, err := sqlite.Open(ctx, sqlite.Options{Path: filepath.Join(cfg.StateDir, "carrel.db"), BusyTimeout: cfg.BusyTimeout, Declared: cfg.Mounts})
	if err != nil {
		return 0, err
	}
	defer func() {
		if closeErr := db.Close(); err == nil {
			err = closeErr
		}
	}()
	if generation, err = db.Recover(ctx, now.Unix(), now); err != nil {
		return 0, fmt.Errorf("raise the generation of the database: %w", err)
	}
	return generation, nil
}
