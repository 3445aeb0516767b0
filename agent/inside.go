package agent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"time"

	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/initlink"
	"github.com/carrel-dev/carrel/proto/stream"
)

// inside gives the host its way to carrel-init in each run.
type inside struct {
	links *initlink.Links
	log   *slog.Logger
}

var _ host.Inside = inside{}

func linkKey(k host.Key) initlink.Key { return initlink.Key{Workspace: k.Workspace, Epoch: k.Epoch} }

func (i inside) Prepare(k host.Key) (string, error) { return i.links.Prepare(linkKey(k)) }

func (i inside) Attach(k host.Key, pid int) error { return i.links.Attach(linkKey(k), pid) }

func (i inside) Configure(ctx context.Context, k host.Key, c host.InsideConfig) (host.InsideAnswer, error) {
	config := initlink.Config{
		Login: c.Identity.Login, UID: c.Identity.UID, GID: c.Identity.GID, Home: c.Home, Sudo: c.Sudo, Env: c.Env, Hostname: c.Hostname,
		HostKey: c.SSH.HostKey, HostCertificate: c.SSH.HostCertificate, AuthorizedKeys: c.SSH.AuthorizedKeys,
	}
	for _, g := range c.Identity.Groups {
		config.Groups = append(config.Groups, initlink.Group{Name: g.Name, GID: g.GID})
	}
	found, err := i.links.Configure(ctx, linkKey(k), config)
	var refused *initlink.RefusedError
	if errors.As(err, &refused) {
		return host.InsideAnswer{}, host.Errorf(host.KindInvalid, "%s", refused.Message)
	}
	return host.InsideAnswer{Sudo: found.Sudo, Shell: found.Shell}, err
}

func (i inside) Stop(ctx context.Context, k host.Key, reason string, grace time.Duration) error {
	return i.links.Stop(ctx, linkKey(k), reason, grace)
}

func (i inside) Forget(k host.Key) {
	if err := i.links.Forget(linkKey(k)); err != nil {
		i.log.Warn("the link directory of a run is left", "run", k.String(), "error", err)
	}
}

// streams joins byte streams of the gateway to runs.
type streams struct {
	links *initlink.Links
	write time.Duration // longest time without progress
	log   *slog.Logger
}

// carry is given each stream once its hello came.
func (s streams) carry(ctx context.Context, hello stream.Hello, conn net.Conn) {
	k := initlink.Key{Workspace: hello.Workspace, Epoch: hello.Epoch}
	run, err := s.links.OpenStream(ctx, k, hello)
	if err != nil {
		s.log.Info("a stream finds no workspace", "workspace", hello.Workspace, "epoch", hello.Epoch, "error", err)
		return
	}
	_, err = stream.Relay(ctx, conn, run, stream.RelayOptions{WriteStall: s.write})
	s.log.Debug("stream ended", "workspace", hello.Workspace, "epoch", hello.Epoch, "error", err)
}
