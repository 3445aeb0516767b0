package command

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/http/httpproxy"

	"github.com/carrel-dev/carrel/cli/config"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
)

const (
	maxMessage = 32 << 20 // bytes of one answer; 1,000 workspaces with 100 leases each are a tenth of it
	// Waits before a call that may be repeated is tried again, each shortened by up to half at random.
	retryFirst  = 250 * time.Millisecond
	retrySecond = 750 * time.Millisecond
)

// errInterrupted is the cause of a context that Ctrl-C ended.
var errInterrupted = errors.New("interrupted")

// api is a deployment's services with one connection pool.
type api struct {
	dep     config.Deployment
	version string
	timeout config.Timeout
	token   string
	tls     *tls.Config
	proxy   func(*http.Request) (*url.URL, error)
	http    *http.Client

	workspaces carrelv1connect.WorkspaceServiceClient
	attach     carrelv1connect.AttachServiceClient
	auth       carrelv1connect.AuthServiceClient
	users      carrelv1connect.UserServiceClient
	devices    carrelv1connect.DeviceServiceClient
	hosts      carrelv1connect.HostServiceClient
	pools      carrelv1connect.PoolServiceClient
	images     carrelv1connect.ImageServiceClient
	volumes    carrelv1connect.VolumeServiceClient
	usage      carrelv1connect.UsageServiceClient
}

// proxyFromEnvironment is HTTPS_PROXY, HTTP_PROXY and NO_PROXY, the same for calls and for byte streams.
func proxyFromEnvironment(getenv func(string) string) func(*http.Request) (*url.URL, error) {
	first := func(names ...string) string {
		for _, n := range names {
			if v := getenv(n); v != "" {
				return v
			}
		}
		return ""
	}
	choose := (&httpproxy.Config{
		HTTPProxy:  first("HTTP_PROXY", "http_proxy"),
		HTTPSProxy: first("HTTPS_PROXY", "https_proxy"),
		NoProxy:    first("NO_PROXY", "no_proxy"),
	}).ProxyFunc()
	return func(r *http.Request) (*url.URL, error) { return choose(r.URL) }
}

// newTransport makes the HTTP transport of calls. roots nil: the system's.
func (a *app) newTransport(roots *x509.CertPool, connect time.Duration) *http.Transport {
	return &http.Transport{
		Proxy:                 proxyFromEnvironment(a.sys.Getenv),
		DialContext:           (&net.Dialer{Timeout: connect}).DialContext,
		TLSClientConfig:       &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		TLSHandshakeTimeout:   connect,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   4,
		IdleConnTimeout:       30 * time.Second,
		ResponseHeaderTimeout: 0, // calls have a deadline, streams a watch
		HTTP2:                 &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second},
	}
}

// newAPI makes the clients of a deployment.
func (a *app) newAPI(dep config.Deployment, token string, timeout config.Timeout) (*api, error) {
	var roots *x509.CertPool
	pem, err := dep.CA()
	if err != nil {
		return nil, failf(exitFailure, "the gateway's CA is not readable (%v): sign in again", err)
	}
	if pem != nil {
		roots = x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return nil, failf(exitFailure, "the gateway's CA file is damaged: sign in again")
		}
	}
	t := a.newTransport(roots, timeout.Connect)
	c := &api{dep: dep, version: a.sys.Version, timeout: timeout, token: token, tls: t.TLSClientConfig, proxy: t.Proxy}
	c.http = &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error {
		return errors.New("the gateway answered with a redirect, which carrel does not follow")
	}}
	options := []connect.ClientOption{
		connect.WithInterceptors(&callRules{api: c}),
		connect.WithReadMaxBytes(maxMessage),
	}
	c.workspaces = carrelv1connect.NewWorkspaceServiceClient(c.http, dep.Gateway, options...)
	c.attach = carrelv1connect.NewAttachServiceClient(c.http, dep.Gateway, options...)
	c.auth = carrelv1connect.NewAuthServiceClient(c.http, dep.Gateway, options...)
	c.users = carrelv1connect.NewUserServiceClient(c.http, dep.Gateway, options...)
	c.devices = carrelv1connect.NewDeviceServiceClient(c.http, dep.Gateway, options...)
	c.hosts = carrelv1connect.NewHostServiceClient(c.http, dep.Gateway, options...)
	c.pools = carrelv1connect.NewPoolServiceClient(c.http, dep.Gateway, options...)
	c.images = carrelv1connect.NewImageServiceClient(c.http, dep.Gateway, options...)
	c.volumes = carrelv1connect.NewVolumeServiceClient(c.http, dep.Gateway, options...)
	c.usage = carrelv1connect.NewUsageServiceClient(c.http, dep.Gateway, options...)
	return c, nil
}

func (c *api) serverInfo(ctx context.Context) (*carrelv1.ServerInfoResponse, error) {
	resp, err := c.auth.ServerInfo(ctx, connect.NewRequest(&carrelv1.ServerInfoRequest{}))
	if err != nil {
		return nil, err
	}
	return resp.Msg, nil
}

// callRules gives calls the token, a deadline and, where that is harmless, another try; errors become failures.
type callRules struct{ api *api }

// WrapUnary applies the rules to a call.
func (r *callRules) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		r.sign(req.Header())
		method := req.Spec().Procedure
		method = method[strings.LastIndexByte(method, '/')+1:]
		var resp connect.AnyResponse
		var err error
		for _, pause := range []time.Duration{retryFirst, retrySecond, 0} {
			resp, err = r.once(ctx, req, next)
			if pause == 0 || !repeatable(method) || !unreached(err) || !sleep(ctx, pause) {
				break
			}
		}
		if err != nil && method != "ServerInfo" {
			err = r.api.rpcError(ctx, err)
		}
		return resp, err
	}
}

func (r *callRules) once(ctx context.Context, req connect.AnyRequest, next connect.UnaryFunc) (connect.AnyResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, r.api.timeout.Request)
	defer cancel()
	return next(ctx, req)
}

// WrapStreamingClient gives a stream the token; whoever reads it maps its errors.
func (r *callRules) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		r.sign(conn.RequestHeader())
		return conn
	}
}

// WrapStreamingHandler does nothing: there are no handlers here.
func (r *callRules) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func (r *callRules) sign(h http.Header) {
	if r.api.token != "" {
		h.Set("Authorization", "Bearer "+r.api.token)
	}
	h.Set("User-Agent", "carrel/"+r.api.version)
}

// repeatable reports whether a call may be made twice: it reads, names its request, or leads to the same state.
func repeatable(method string) bool {
	for _, prefix := range []string{"Get", "List", "Plan", "WhoAmI", "ServerInfo", "SshConfig", "Report", "Create", "Start", "Stop", "Restart"} {
		if strings.HasPrefix(method, prefix) {
			return !strings.HasPrefix(method, "CreateSignIn") && !strings.HasPrefix(method, "CreateJoinToken") && !strings.HasPrefix(method, "CreateProject")
		}
	}
	return false
}

// unreached reports whether a call failed on the way, in a manner that may pass.
func unreached(err error) bool {
	if err == nil || connect.CodeOf(err) != connect.CodeUnavailable {
		return false
	}
	var cert *tls.CertificateVerificationError
	var dns *net.DNSError
	return !errors.As(err, &cert) && !errors.As(err, &dns)
}

// sleep waits for about d, and reports whether it did to the end.
func sleep(ctx context.Context, d time.Duration) bool {
	d -= rand.N(d/2 + 1)
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// allPages calls page until it gives no next token.
func allPages[T any](page func(token string) (rows []T, next string, err error)) ([]T, error) {
	var all []T
	token := ""
	for {
		rows, next, err := page(token)
		if err != nil {
			return nil, err
		}
		all = append(all, rows...)
		if next == "" {
			return all, nil
		}
		if next == token {
			return nil, fmt.Errorf("the gateway gives the same page again and again")
		}
		token = next
	}
}
