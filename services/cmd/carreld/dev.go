package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/carrel-dev/carrel/agent"
	agentconfig "github.com/carrel-dev/carrel/agent/config"
	"github.com/carrel-dev/carrel/services/config"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/gateway"
)

// What `carreld dev` sets where nobody else does.
const (
	devGPUs  = "simulated:4x4090"  // without an NVIDIA driver
	devImage = "carrel/base:local" // what `make quickstart` builds
)

// devSkip are agent settings that have no flag here, since the gateway has one of that name.
var devSkip = []string{"dangerous_plain_http", "stream.write_timeout", "log.level", "log.format", "name"}

// runDev runs gateway and agent in one process. They speak over the same connections as they do on two machines.
func runDev(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	flags := newGatewayFlags("dev", stderr)
	agentFile := agentconfig.Flags(flags.set, "agent-config", devSkip...)
	cfg, agentCfg, err := devSettings(flags, agentFile, args)
	if err != nil {
		return err
	}
	log := logger(stderr, cfg.LogLevel, cfg.LogFormat)
	g, err := gateway.Open(ctx, cfg, version, log)
	if err != nil {
		return err
	}
	err = serveDev(ctx, g, cfg, agentCfg, *flags.admin, stdout, log)
	return errors.Join(err, g.Close())
}

// devSettings loads both programs' settings, with defaults for one machine.
func devSettings(flags gatewayFlags, agentFile *string, args []string) (config.Config, agentconfig.Config, error) {
	env := os.Environ()
	for key, value := range map[string]string{"IMAGES_ALLOW": "any", "IMAGES_DEFAULT": devImage, "STATE": devStateDir()} {
		if name := config.EnvPrefix + key; os.Getenv(name) == "" {
			if err := os.Setenv(name, value); err != nil {
				return config.Config{}, agentconfig.Config{}, err
			}
		}
	}
	cfg, err := flags.parse(args)
	if err != nil {
		return cfg, agentconfig.Config{}, err
	}
	agentCfg, agentErr := agentconfig.Load(*agentFile, env, flags.set)
	if agentErr != nil {
		return cfg, agentCfg, fleet.Errorf(fleet.KindInvalid, "the agent's settings:\n%w", agentErr)
	}
	given := flags.set.Lookup("data").Value.String() != "" || os.Getenv(agentconfig.EnvPrefix+"DATA") != ""
	if !given && *agentFile == "" {
		agentCfg.DataDir = filepath.Join(cfg.StateDir, "agent")
	}
	if agentCfg.GPUs == "auto" && !nvidiaDriver() {
		agentCfg.GPUs = devGPUs
	}
	return cfg, agentCfg, nil
}

// devStateDir keeps a one-box lab apart from an installed gateway.
func devStateDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/carrel-dev"
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "carrel-dev-state"
	}
	return filepath.Join(home, ".local", "state", "carrel-dev")
}

// nvidiaDriver reports whether this machine has an NVIDIA driver that answers.
func nvidiaDriver() bool {
	_, err := os.Stat("/proc/driver/nvidia/version")
	if err == nil {
		return true
	}
	_, err = exec.LookPath("nvidia-smi")
	return err == nil
}

func serveDev(ctx context.Context, g *gateway.Gateway, cfg config.Config, agentCfg agentconfig.Config, admin string, stdout io.Writer, log *slog.Logger) error {
	lock, err := agent.Lock(agentCfg.DataDir)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // nothing was written that could be lost
	id, err := devIdentity(ctx, g, agentCfg)
	if err != nil {
		return err
	}
	a, err := agent.New(ctx, agent.Options{Config: agentCfg, Identity: id, Version: version, Log: log})
	if err != nil {
		return err
	}
	if err := announce(ctx, g, cfg, admin, agentCfg.GPUs, stdout); err != nil {
		return err
	}
	agentCtx, stopAgent := context.WithCancel(context.WithoutCancel(ctx))
	defer stopAgent()
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return g.Run(groupCtx) })
	group.Go(func() error { return a.Run(agentCtx) })
	group.Go(func() error {
		<-groupCtx.Done()
		stopAgent()
		return nil
	})
	return group.Wait()
}

// devIdentity registers this machine at its own gateway without a join token.
func devIdentity(ctx context.Context, g *gateway.Gateway, cfg agentconfig.Config) (agent.Identity, error) {
	id, err := agent.LoadIdentity(cfg.DataDir)
	if err != nil {
		return id, err
	}
	name := cfg.Name
	if name == "" {
		name = localName()
	}
	host, err := g.EnsureLocalHost(ctx, name, id.PublicKey())
	if err != nil {
		return id, err
	}
	id.HostID, id.Name, id.Gateway, id.CA = string(host.ID), host.Name, g.LocalURL(), g.CAPEM()
	return id, id.Save(cfg.DataDir)
}

// localName makes a host name that fleet.CheckName takes out of the machine's.
func localName() string {
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	name, _, _ = strings.Cut(strings.ToLower(name), ".")
	if len(name) > fleet.MaxNameLength {
		name = strings.TrimRight(name[:fleet.MaxNameLength], "-")
	}
	if fleet.CheckName("host", name) != nil {
		return "localhost"
	}
	return name
}

// announce writes the address, and at the first start the one-time sign-in, into the state directory and prints them.
func announce(ctx context.Context, g *gateway.Gateway, cfg config.Config, admin, gpus string, stdout io.Writer) error {
	link, err := g.FirstAdmin(ctx, admin)
	if err != nil {
		return err
	}
	if err := publish(cfg.StateDir, g.BaseURL()); err != nil {
		return err
	}
	signIn := filepath.Join(cfg.StateDir, "sign-in")
	if link != "" {
		if err := os.WriteFile(signIn, []byte(link+"\n"), 0o600); err != nil {
			return fmt.Errorf("write the first sign-in: %w", err)
		}
		fmt.Fprintf(stdout, "first start: sign in as %s within 24 h with\n\n  carrel login '%s'\n\n", admin, link)
	}
	if strings.HasPrefix(gpus, "simulated:") {
		fmt.Fprintf(stdout, "no NVIDIA driver here: %s are SIMULATED GPUs, which compute nothing\n", strings.TrimPrefix(gpus, "simulated:"))
	}
	_, err = fmt.Fprintf(stdout, "carreld dev serves at %s\n", g.BaseURL())
	return err
}
