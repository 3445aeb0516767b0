package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/config"
	"github.com/carrel-dev/carrel/cli/output"
)

// app is what all verbs share.
type app struct {
	sys   System
	flags struct {
		deployment string
		configDir  string
	}
	dir      config.Dir
	settings *config.Settings
}

// Interrupted returns ctx with a function that ends it as Ctrl-C does.
func Interrupted(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	return ctx, func() { cancel(errInterrupted) }
}

// Main runs a command line (without the program's name) and returns the exit code.
func Main(ctx context.Context, args []string, sys System) int {
	out := &watchedWriter{w: sys.Out}
	sys.Out = out
	a := &app{sys: sys}
	root := newRoot(a) //nolint:contextcheck // verbs take the context that ExecuteContext hands to their commands
	root.SetArgs(args)
	root.SetIn(sys.In)
	root.SetOut(sys.Out)
	root.SetErr(sys.Err)
	err := root.ExecuteContext(ctx)
	if err == nil && out.err != nil {
		err = fmt.Errorf("write output: %w", out.err)
	}
	if errors.Is(err, syscall.EPIPE) || errors.Is(out.err, syscall.EPIPE) {
		return exitFailure // whoever read the output has gone: nobody to tell
	}
	if text := message(err); text != "" && !errors.As(err, new(remoteExit)) {
		_, _ = fmt.Fprintln(sys.Err, "carrel: "+text)
	}
	return exitCode(err)
}

// watchedWriter remembers that a write failed, for the writers that do not tell.
type watchedWriter struct {
	w   io.Writer
	err error
}

func (w *watchedWriter) Write(p []byte) (int, error) {
	n, err := w.w.Write(p)
	if err != nil && w.err == nil {
		w.err = err
	}
	return n, err
}

// load reads the settings, once.
func (a *app) load() error {
	if a.settings != nil {
		return nil
	}
	dir, err := config.FindDir(a.flags.configDir, a.sys.Getenv)
	if err != nil {
		return failf(exitUsage, "%v", err)
	}
	s, err := dir.Settings(a.sys.Getenv)
	if err != nil {
		return failf(exitUsage, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	a.dir, a.settings = dir, &s
	return nil
}

// deployment returns the one that this call is about.
func (a *app) deployment() (config.Deployment, error) {
	if err := a.load(); err != nil {
		return config.Deployment{}, err
	}
	name := a.flags.deployment
	token, gateway := a.sys.Getenv("CARREL_TOKEN"), a.sys.Getenv("CARREL_GATEWAY")
	if name == "" && (token != "" || gateway != "") {
		if token == "" || gateway == "" {
			return config.Deployment{}, usagef("CARREL_TOKEN and CARREL_GATEWAY go together: set both or none")
		}
		dep, err := config.FromEnvironment(gateway, token)
		if err != nil {
			return config.Deployment{}, usagef("%v", err)
		}
		return dep, nil
	}
	if name == "" {
		name = a.settings.Deployment
	}
	if name == "" {
		var err error
		if name, err = a.onlyDeployment(); err != nil {
			return config.Deployment{}, err
		}
	}
	dep, err := a.dir.Load(name)
	if errors.Is(err, fs.ErrNotExist) {
		names, _ := a.dir.Deployments()
		if len(names) == 0 {
			return config.Deployment{}, failf(exitSignIn, "not signed in to a deployment named %s: run `carrel login LINK`", name)
		}
		return config.Deployment{}, usagef("no deployment named %s here; there is %s", name, strings.Join(names, ", "))
	}
	return dep, err
}

func (a *app) onlyDeployment() (string, error) {
	name, err := a.dir.Default()
	if err != nil || name != "" {
		return name, err
	}
	names, err := a.dir.Deployments()
	if err != nil {
		return "", err
	}
	if len(names) > 0 {
		return "", usagef("you are signed in to several deployments (%s): name one with --deployment, or choose with `carrel deployment use NAME`", strings.Join(names, ", "))
	}
	return "", failf(exitSignIn, "not signed in: run `carrel login LINK` with the link that your admin gave you")
}

// connect returns the API of the deployment, for somebody who is signed in. Nothing is sent yet.
func (a *app) connect() (*api, error) {
	dep, err := a.deployment()
	if err != nil {
		return nil, err
	}
	token, err := dep.Token()
	if err != nil {
		return nil, failf(exitFailure, "the token is not readable: %v", err)
	}
	api, err := a.newAPI(dep, token, a.settings.Timeout)
	if err != nil {
		return nil, err
	}
	if token == "" {
		return nil, failf(exitSignIn, "%s", api.signInText("no token on this machine"))
	}
	return api, nil
}

// say writes a notice for people to stderr.
func (a *app) say(format string, args ...any) {
	_, _ = fmt.Fprintln(a.sys.Err, output.Line(fmt.Sprintf(format, args...)))
}

// print writes a line of the result to stdout.
func (a *app) print(format string, args ...any) error {
	_, err := fmt.Fprintln(a.sys.Out, output.Line(fmt.Sprintf(format, args...)))
	return err
}

// color reports whether stdout takes colours (https://no-color.org).
func (a *app) color() bool {
	return a.sys.OutTerminal && a.sys.Getenv("NO_COLOR") == "" && a.sys.Getenv("TERM") != "dumb"
}

// confirm asks on a terminal; without one it fails naming the flag that goes on.
func (a *app) confirm(yes bool, question string) error {
	if yes {
		return nil
	}
	if !a.sys.InTerminal || !a.sys.ErrTerminal {
		return usagef("%s: nobody to ask here; add -y (--yes) to go on", question)
	}
	_, _ = fmt.Fprintf(a.sys.Err, "%s? [y/N] ", output.Line(question))
	answer, err := readLine(a.sys.In)
	if err != nil {
		return err
	}
	if answer != "y" && answer != "yes" && answer != "Y" {
		return failf(exitFailure, "nothing was changed")
	}
	return nil
}

// readLine reads up to a line end, byte by byte so that nothing behind it is taken.
func readLine(r io.Reader) (string, error) {
	var b strings.Builder
	var one [1]byte
	for b.Len() < 64<<10 {
		n, err := r.Read(one[:])
		if n == 1 && one[0] == '\n' {
			break
		}
		b.Write(one[:n])
		if err != nil {
			if errors.Is(err, io.EOF) {
				break
			}
			return "", err
		}
	}
	return strings.TrimSpace(b.String()), nil
}

// listFlags are the flags of every command that lists.
type listFlags struct {
	format string
	quiet  bool
	noHead bool
}

func (a *app) listFlags(cmd *cobra.Command, l *listFlags) {
	a.formatFlag(cmd, &l.format)
	cmd.Flags().BoolVarP(&l.quiet, "quiet", "q", false, "names or ids only")
	cmd.Flags().BoolVar(&l.noHead, "no-head", false, "tables without their head")
}

func (a *app) formatFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVarP(format, "output", "o", "", "table, json or csv")
}

func (a *app) format(flag string) (output.Format, error) {
	if flag == "" {
		if err := a.load(); err != nil {
			return "", err
		}
		flag = a.settings.Output
	}
	f, err := output.ParseFormat(flag)
	if err != nil {
		return "", usagef("%v", err)
	}
	return f, nil
}

func writeList[T any](a *app, l output.List[T], rows []T, flags listFlags) error {
	f, err := a.format(flags.format)
	if err != nil {
		return err
	}
	return l.Write(a.sys.Out, rows, output.Options{Format: f, Quiet: flags.quiet, Color: a.color(), NoHead: flags.noHead})
}

// early checks flags that would otherwise be refused only after the call.
func (a *app) early(flags listFlags) error {
	_, err := a.format(flags.format)
	return err
}
