package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/carrel-dev/carrel/services/config"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/gateway"
)

// gatewayFlags are the flags of the programs that run a gateway, besides its settings.
type gatewayFlags struct {
	set   *flag.FlagSet
	file  *string
	admin *string
}

func newGatewayFlags(name string, stderr io.Writer) gatewayFlags {
	fs := flag.NewFlagSet("carreld "+name, flag.ContinueOnError)
	fs.SetOutput(stderr)
	return gatewayFlags{set: fs, file: config.Flags(fs), admin: fs.String("admin", "admin", "name of the account that the first start makes")}
}

// parse reads flags, file and environment. All faults are reported together.
func (f gatewayFlags) parse(args []string) (config.Config, error) {
	if err := f.set.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return config.Config{}, err
		}
		return config.Config{}, errUsage
	}
	if f.set.NArg() > 0 {
		return config.Config{}, fleet.Errorf(fleet.KindInvalid, "unexpected argument %q; settings are flags such as --listen", f.set.Arg(0))
	}
	cfg, err := config.Load(*f.file, os.Environ(), f.set)
	if err != nil {
		return cfg, fleet.Errorf(fleet.KindInvalid, "settings:\n%w", err)
	}
	return cfg, nil
}

func runGateway(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := newGatewayFlags("gateway", stderr)
	cfg, err := flags.parse(args)
	if err != nil {
		return err
	}
	log := logger(stderr, cfg.LogLevel, cfg.LogFormat)
	g, err := gateway.Open(ctx, cfg, version, log)
	if err != nil {
		return err
	}
	link, err := g.FirstAdmin(ctx, *flags.admin)
	if err != nil {
		return errors.Join(err, g.Close())
	}
	if link != "" {
		fmt.Fprintf(stdout, "first start: sign in as %s within 24 h with\n\n  carrel login '%s'\n\n", *flags.admin, link)
	}
	if err := publish(cfg.StateDir, g.BaseURL()); err != nil {
		return errors.Join(err, g.Close())
	}
	log.Info("gateway serves", "url", g.BaseURL(), "version", version, "plain_http", cfg.PlainHTTP())
	return errors.Join(g.Run(ctx), g.Close())
}

// publish writes the address into the state directory, for programs on the same machine that started the gateway on port 0.
func publish(stateDir, url string) error {
	return os.WriteFile(filepath.Join(stateDir, "url"), []byte(url+"\n"), 0o600)
}

func runConfig(_ context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 || args[0] != "print" {
		return fleet.Errorf(fleet.KindInvalid, "use `carreld config print [flags]`")
	}
	cfg, err := newGatewayFlags("config print", stderr).parse(args[1:])
	if err != nil {
		return err
	}
	return config.Print(stdout, cfg)
}
