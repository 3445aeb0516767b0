package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/gateway"
)

// runRecover is run once, with the gateway stopped, after its database was put back from an older copy.
func runRecover(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	cfg, err := newGatewayFlags("recover", stderr).parse(args)
	if err != nil {
		return err
	}
	if path := filepath.Join(cfg.StateDir, "carrel.db"); !isFile(path) {
		return fleet.Errorf(fleet.KindInvalid, "there is no database %s; name its directory with --state", path)
	}
	generation, err := gateway.Recover(ctx, cfg, time.Now())
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "hosts follow this database again, as generation %d. Containers that it does not know go on and keep their GPUs: `carrel host ls` lists them.\n", generation)
	return err
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
