package command

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/output"
	"github.com/carrel-dev/carrel/proto/stream"
)

// Exit codes, as docs/cli.md has them.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitSignIn      = 3 // not signed in, or not allowed
	exitNotFound    = 4
	exitConflict    = 5 // exists already, is in the wrong state, or a limit is reached
	exitUnavailable = 6
	exitInterrupted = 130 // 128 + SIGINT, as shells have it
	exitSSH         = 255 // our own failures in ssh, exec and proxy, as ssh itself has it
)

// failure is an error with an exit code of its own; an empty text was said already.
type failure struct {
	code  int
	text  string
	ended bool // the token is no longer good
}

func (f *failure) Error() string { return f.text }

func failf(code int, format string, args ...any) error {
	return &failure{code: code, text: fmt.Sprintf(format, args...)}
}

func usagef(format string, args ...any) error { return failf(exitUsage, format, args...) }

// said ends with a code after everything was printed.
func said(code int) error { return &failure{code: code} }

// remoteExit passes on the status of a program that ran elsewhere.
type remoteExit int

func (r remoteExit) Error() string { return fmt.Sprintf("exit status %d", int(r)) }

// asSSH gives a failure ssh's own exit code, so that every other code is the remote program's.
func asSSH(err error) error {
	var r remoteExit
	if err == nil || errors.As(err, &r) {
		return err
	}
	return &failure{code: exitSSH, text: message(err)}
}

func message(err error) string {
	if err == nil {
		return ""
	}
	return strings.TrimSpace(output.Line(err.Error()))
}

func exitCode(err error) int {
	var f *failure
	var r remoteExit
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &r):
		return int(r)
	case errors.As(err, &f):
		return f.code
	case errors.Is(err, config.ErrNoDeployment):
		return exitSignIn
	default:
		return exitFailure
	}
}

// codeOf gives the exit code of a Connect code.
func codeOf(c connect.Code) int {
	switch c {
	case connect.CodeInvalidArgument, connect.CodeOutOfRange:
		return exitUsage
	case connect.CodeUnauthenticated, connect.CodePermissionDenied:
		return exitSignIn
	case connect.CodeNotFound:
		return exitNotFound
	case connect.CodeAlreadyExists, connect.CodeFailedPrecondition, connect.CodeAborted, connect.CodeResourceExhausted:
		return exitConflict
	case connect.CodeUnavailable, connect.CodeDeadlineExceeded:
		return exitUnavailable
	case connect.CodeCanceled:
		return exitInterrupted
	default:
		return exitFailure
	}
}

// rpcError turns what a call returned into a failure with a sentence for a person.
func (a *api) rpcError(ctx context.Context, err error) error {
	var f *failure
	if err == nil || errors.As(err, &f) {
		return err
	}
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), errInterrupted) {
		return failf(exitInterrupted, "interrupted")
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return a.netError(err)
	}
	switch {
	case ce.Code() == connect.CodeUnimplemented:
		return a.versionError(ctx, ce)
	case ce.Code() == connect.CodeUnauthenticated:
		return &failure{code: exitSignIn, text: a.signInText(ce.Message()), ended: true}
	case connect.IsWireError(err):
		return failf(codeOf(ce.Code()), "%s", sentence(ce))
	default:
		return a.netError(err)
	}
}

func sentence(ce *connect.Error) string {
	text := strings.TrimSpace(output.Line(ce.Message()))
	if text == "" {
		text = "the gateway answered " + ce.Code().String() + " without a reason"
	}
	return text
}

// signInText says where to sign in, with the real address.
func (a *api) signInText(why string) string {
	why = strings.TrimSpace(output.Line(why))
	if why == "" {
		why = "the session has ended"
	}
	return fmt.Sprintf("not signed in at %s (%s): run `carrel login %s/#sign-in=...` with a fresh link, which an admin gets by `carrel user sign-in NAME`",
		a.dep.Gateway, strings.TrimSuffix(why, "."), a.dep.Gateway)
}

// netError explains a call that got no answer of a gateway's.
func (a *api) netError(err error) error {
	return failf(exitUnavailable, "gateway %s: %s; `carrel doctor` looks closer", a.dep.Gateway, netReason(err))
}

func netReason(err error) string {
	var (
		proxy   *stream.ProxyError
		cert    *tls.CertificateVerificationError
		unknown x509.UnknownAuthorityError
		dns     *net.DNSError
		op      *net.OpError
		link    *url.Error
	)
	switch {
	case errors.As(err, &proxy):
		return message(proxy)
	case errors.As(err, &unknown):
		return "its certificate is signed by an authority that this machine does not know; sign in again with a link that carries the CA's fingerprint"
	case errors.As(err, &cert):
		return "its certificate is not right: " + message(cert.Err)
	case errors.As(err, &dns):
		return "no such host: " + dns.Name
	case errors.Is(err, context.DeadlineExceeded), os.IsTimeout(err):
		return "no answer in time"
	case errors.As(err, &op) && op.Op == "proxyconnect":
		return fmt.Sprintf("proxy %s: %s", op.Addr, message(op.Err))
	case errors.As(err, &op):
		return "not reached: " + message(op.Err)
	case errors.As(err, &link):
		return "not reached: " + message(link.Err)
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return sentence(ce)
	}
	return message(err)
}

// versionError explains that the gateway does not know a procedure.
func (a *api) versionError(ctx context.Context, ce *connect.Error) error {
	info, err := a.serverInfo(ctx)
	if err != nil {
		return failf(exitUnavailable, "%s does not answer as a Carrel gateway (%s)", a.dep.Gateway, sentence(ce))
	}
	gateway := output.Line(info.GetVersion())
	word := "too old or too new"
	if newer, known := newerVersion(a.version, gateway); known {
		if newer {
			word = "too old"
		} else {
			word = "too new"
		}
	}
	return failf(exitFailure, "the gateway is %s for this command: gateway %s, this carrel %s; bring both to one version", word, gateway, a.version)
}

// statusError explains a refusal of the byte stream before it began.
func (a *api) statusError(err error) error {
	var s *stream.StatusError
	if !errors.As(err, &s) {
		return a.netError(err)
	}
	text := strings.TrimSpace(output.Line(s.Body))
	if text == "" {
		text = http.StatusText(s.Code)
	}
	if s.Code == http.StatusUnauthorized {
		return failf(exitSignIn, "%s", a.signInText(text))
	}
	return failf(exitUnavailable, "gateway %s: %s (%d)", a.dep.Gateway, strings.TrimSuffix(text, "."), s.Code)
}

// exactArgs wants one argument for each of names.
func exactArgs(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) < len(names) {
			return usagef("%s: %s is missing; see `%s --help`", cmd.CommandPath(), strings.Join(names[len(args):], " and "), cmd.CommandPath())
		}
		if len(args) > len(names) {
			return usagef("%s: %q is one argument too many; see `%s --help`", cmd.CommandPath(), args[len(names)], cmd.CommandPath())
		}
		return nil
	}
}
