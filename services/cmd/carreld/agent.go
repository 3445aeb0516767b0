package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/carrel-dev/carrel/agent"
	agentconfig "github.com/carrel-dev/carrel/agent/config"
	"github.com/carrel-dev/carrel/services/fleet"
)

func runAgent(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	fs := flag.NewFlagSet("carreld agent", flag.ContinueOnError)
	fs.SetOutput(stderr)
	file := agentconfig.Flags(fs, "config")
	join := fs.String("join", "", "join a gateway first, with a token of `carrel host token`; `-` reads it from stdin")
	if err := fs.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return err
		}
		return errUsage
	}
	cfg, err := agentconfig.Load(*file, os.Environ(), fs)
	if err != nil {
		return fleet.Errorf(fleet.KindInvalid, "settings:\n%w", err)
	}
	lock, err := agent.Lock(cfg.DataDir)
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }() // nothing was written that could be lost
	id, err := identity(ctx, cfg, *join, stdout)
	if err != nil {
		return err
	}
	a, err := agent.New(ctx, agent.Options{Config: cfg, Identity: id, Version: version, Log: logger(stderr, cfg.LogLevel, cfg.LogFormat)})
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// identity joins when a token is given, else takes the identity of an earlier join. A host that has joined already keeps its identity,
// so that a service file may carry the token for ever.
func identity(ctx context.Context, cfg agentconfig.Config, token string, stdout io.Writer) (agent.Identity, error) {
	id, err := agent.LoadIdentity(cfg.DataDir)
	if err != nil || token == "" {
		return id, err
	}
	if id.HostID != "" {
		fmt.Fprintf(stdout, "this host is %s of %s already; the join token is not used (to join anew, move %s away)\n", id.Name, id.Gateway, cfg.DataDir)
		return id, nil
	}
	if token == "-" {
		text, err := io.ReadAll(io.LimitReader(os.Stdin, 4<<10))
		if err != nil {
			return id, fmt.Errorf("read the join token: %w", err)
		}
		token = strings.TrimSpace(string(text))
	}
	id, err = agent.Join(ctx, agent.JoinRequest{DataDir: cfg.DataDir, Token: token, Name: cfg.Name, Version: version, PlainHTTP: cfg.DangerousPlainHTTP})
	if err != nil {
		return id, err
	}
	fmt.Fprintf(stdout, "joined %s as host %s\n", id.Gateway, id.Name)
	return id, nil
}
