package gateway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/carrel-dev/carrel/proto/stream"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/config"
	"github.com/carrel-dev/carrel/services/event"
	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/hostclient"
	"github.com/carrel-dev/carrel/services/lifecycle"
	"github.com/carrel-dev/carrel/services/rpc"
	"github.com/carrel-dev/carrel/services/scheduler"
	"github.com/carrel-dev/carrel/services/sqlite"
	"github.com/carrel-dev/carrel/services/tunnel"
)

// mostTickets is how many tickets and nonces may be open at once: far more than any deployment opens in their 30 s.
const mostTickets = 20000

// firstAdminSignInLife is how long the very first sign-in can be used: an admin may set the machine up today and sign in tomorrow.
const firstAdminSignInLife = 24 * time.Hour

// Gateway is one running gateway. Open makes it, Run serves until its context ends, Close releases the database.
type Gateway struct {
	cfg     config.Config
	version string
	log     *slog.Logger
	now     func() time.Time

	db         *sqlite.DB
	ca         *auth.TLSCA
	hostCA     *auth.HostCA
	tickets    *auth.Tickets[rpc.StreamGrant]
	challenges *auth.Challenges
	events     *event.Broker
	tunnel     *tunnel.Tunnel
	hosts      *hostclient.Client
	lifecycle  *lifecycle.Lifecycle
	gate       *rpc.Gate
	listener   net.Listener
	ready      readiness
}

// Open opens the state directory, the database and the port. Nothing is served before Run.
func Open(ctx context.Context, cfg config.Config, version string, log *slog.Logger) (*Gateway, error) {
	g := &Gateway{
		cfg: cfg, version: version, log: log,
		tickets: auth.NewTickets[rpc.StreamGrant](cfg.TicketLife, mostTickets), challenges: auth.NewChallenges(mostTickets), events: event.New(),
	}
	if err := g.openKeys(); err != nil {
		return nil, err
	}
	if err := g.openStore(ctx); err != nil {
		return nil, err
	}
	if err := g.openParts(ctx); err != nil {
		return nil, errors.Join(err, g.db.Close())
	}
	return g, nil
}

func (g *Gateway) openKeys() error {
	dir, err := auth.OpenKeyDir(filepath.Join(g.cfg.StateDir, "keys"))
	if err != nil {
		return err
	}
	sealer, err := dir.Sealer()
	if err != nil {
		return err
	}
	if g.hostCA, err = dir.HostCA(sealer); err != nil {
		return err
	}
	g.ca, err = dir.TLSCA(g.cfg.Deployment, time.Now())
	return err
}

func (g *Gateway) openStore(ctx context.Context) error {
	var err error
	g.db, err = sqlite.Open(ctx, sqlite.Options{
		Path: filepath.Join(g.cfg.StateDir, "carrel.db"), BusyTimeout: g.cfg.BusyTimeout, DefaultGPULimit: max(g.cfg.GPUsPerUser, 0),
		Declared: g.cfg.Mounts, Log: g.log,
	})
	return err
}

func (g *Gateway) openParts(ctx context.Context) error {
	last, err := g.db.LastCommit(ctx)
	if err != nil {
		return err
	}
	g.now = lifecycle.NewClock(time.Now(), lifecycle.BootTime, last).Now
	g.tunnel = g.newTunnel()
	identities := lifecycle.NewIdentities(g.hostCA, g.now)
	g.hosts = hostclient.New(g.tunnel, identities, g.now, hostclient.Settings{Deployment: g.cfg.Deployment})
	g.lifecycle = lifecycle.New(lifecycle.Deps{
		Store: g.db, Reader: g.db, Hosts: g.hosts, Events: g.events, Keys: g.hostCA, Now: g.now, Log: g.log, Settings: g.lifecycleSettings(),
	})
	g.gate = rpc.NewGate(g.db, g.now, g.log)
	g.listener, err = listen(ctx, &g.cfg, g.ca, g.now())
	return err
}

func (g *Gateway) lifecycleSettings() lifecycle.Settings {
	set := lifecycle.Settings{
		Scheduler: scheduler.Settings{ReserveAfter: g.cfg.ReserveAfter}, Images: lifecycle.ImagePolicy(g.cfg.ImagesAllow), Registries: g.cfg.ImagesRegistries,
		DefaultImage: g.cfg.ImagesDefault, WorkspaceLimit: g.cfg.WorkspacesPerUser,
		StopGrace: g.cfg.StopGrace, Tick: g.cfg.Tick, SampleInterval: g.cfg.SampleInterval, ApplyTimeout: g.cfg.CallTimeout,
		SilentAfter: g.cfg.LinkPing + g.cfg.LinkPingTimeout + g.cfg.Tick,
	}
	if g.cfg.GPUsPerUser >= 0 {
		set.GPULimit = &g.cfg.GPUsPerUser
	}
	return set
}

func (g *Gateway) newTunnel() *tunnel.Tunnel {
	return tunnel.New(tunnel.Options{
		Log: g.log,
		DialBack: func(ctx context.Context, host string, n int) error {
			return g.hosts.DialBack(ctx, fleet.HostID(host), n)
		},
		OnUp:        func(host string, session int64) { g.lifecycle.HostUp(fleet.HostID(host), session) },
		OnDown:      g.hostDown,
		Turned:      stream.TurnedOptions{PingAfter: g.cfg.LinkPing, PingTimeout: g.cfg.LinkPingTimeout, WriteStall: g.cfg.StreamWriteTimeout, Log: g.log},
		Relay:       stream.RelayOptions{WriteStall: g.cfg.StreamWriteTimeout},
		MaxPerUser:  g.cfg.StreamsPerUser,
		OpenTimeout: g.cfg.StreamOpenTimeout,
	})
}

func (g *Gateway) hostDown(host string, session int64, _ error) {
	g.lifecycle.HostDown(fleet.HostID(host), session)
}

// Addr returns the address that was bound.
func (g *Gateway) Addr() string { return g.listener.Addr().String() }

// BaseURL returns the URL as clients reach it.
func (g *Gateway) BaseURL() string { return g.cfg.BaseURL(g.Addr()) }

// caFingerprint is what links and join tokens pin; empty where a client needs no pin.
func (g *Gateway) caFingerprint() string {
	if g.cfg.PlainHTTP() || g.cfg.TLSCertFile != "" {
		return ""
	}
	return g.ca.Fingerprint()
}

// FirstAdmin makes the admin at the first start and returns a one-time sign-in; empty at any later start.
func (g *Gateway) FirstAdmin(ctx context.Context, name string) (link string, err error) {
	admin, created, err := g.db.FirstAdmin(ctx, name, g.now())
	if err != nil || !created {
		return "", err
	}
	return g.SignIn(ctx, admin.ID, firstAdminSignInLife)
}

// SignIn makes a one-time sign-in for a user.
func (g *Gateway) SignIn(ctx context.Context, user fleet.UserID, life time.Duration) (string, error) {
	code := auth.NewCode()
	if err := g.db.AddSignIn(ctx, user, code.Hash, g.now().Add(life), g.now()); err != nil {
		return "", err
	}
	return g.signInLink(code.Text), nil
}

func (g *Gateway) signInLink(code string) string {
	return auth.SignInLink(g.BaseURL(), code, g.caFingerprint())
}

// EnsureLocalHost registers the agent of this very process's machine, which needs no join token.
func (g *Gateway) EnsureLocalHost(ctx context.Context, name string, publicKey []byte) (fleet.Host, error) {
	return g.db.EnsureLocalHost(ctx, name, "", publicKey, g.now())
}

// CAPEM returns the own CA's certificate; nil where clients need none.
func (g *Gateway) CAPEM() []byte {
	if g.caFingerprint() == "" {
		return nil
	}
	return g.ca.PEM()
}

// Run serves until ctx ends, then stops in order: refuse new calls, end streams, let calls finish within the grace, stop the loops.
func (g *Gateway) Run(ctx context.Context) error {
	loops, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stopLoops := func() { cancel(errStopping) } // long streams end with it, and their clients see it
	defer stopLoops()
	server := newServer(&g.cfg, g.ownHosts(g.routes()), g.log)
	server.BaseContext = func(net.Listener) context.Context { return loops }
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error {
		err := g.lifecycle.Run(loops)
		if ctx.Err() != nil {
			return nil
		}
		return err
	})
	group.Go(func() error { return serveMetrics(groupCtx, g.cfg.MetricsListen, g.metrics()) })
	group.Go(func() error {
		g.ready.set(true)
		if err := server.Serve(g.listener); !errors.Is(err, http.ErrServerClosed) {
			return fmt.Errorf("public port: %w", err)
		}
		return nil
	})
	group.Go(func() error {
		<-groupCtx.Done()
		g.ready.set(false)
		defer stopLoops()
		return g.stop(context.WithoutCancel(ctx), server, stopLoops)
	})
	return group.Wait()
}

// errStopping is what clients see of calls that the end of the gateway cuts.
var errStopping = fleet.Errorf(fleet.KindUnavailable, "the gateway is stopping; try again")

// stop ends what clients hold open. Calls of long streams end with the loops' context after a tenth of the grace.
func (g *Gateway) stop(ctx context.Context, server *http.Server, stopLoops func()) error {
	ctx, cancel := context.WithTimeout(ctx, g.cfg.ShutdownGrace)
	defer cancel()
	timer := time.AfterFunc(g.cfg.ShutdownGrace/10, stopLoops)
	defer timer.Stop()
	tunnelErr := g.tunnel.Shutdown(ctx)
	if err := server.Shutdown(ctx); err != nil {
		return errors.Join(tunnelErr, server.Close())
	}
	return tunnelErr
}

// Close releases port and database. Call it after Run has returned, or instead of Run.
func (g *Gateway) Close() error {
	_ = g.listener.Close() // Run has closed it already
	return g.db.Close()
}

// LocalURL returns the URL under which this machine reaches the gateway, whatever name others use.
func (g *Gateway) LocalURL() string {
	scheme := "https"
	if g.cfg.PlainHTTP() {
		scheme = "http"
	}
	host, port, err := net.SplitHostPort(g.Addr())
	if err != nil {
		return g.BaseURL()
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return scheme + "://" + net.JoinHostPort(host, port)
}
