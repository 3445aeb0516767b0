package command

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/sshconfig"
)

func newSSH(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "ssh NAME [-- ARGS...]",
		Short: "Open a shell in a workspace with the system's ssh; ARGS are ssh's options and command",
		Long: `Runs ssh with the managed configuration. What follows NAME goes to ssh as it is: options (-L, -D, -N ...) and a command,
which ssh joins with blanks and gives to the shell inside. The exit status is ssh's: the remote program's, or 255 where
the connection failed, which is also the status of carrel's own failures here.`,
		Example: `  carrel ssh fraud
  carrel ssh fraud -- -L 8888:127.0.0.1:8888 -N
  carrel ssh fraud -- 'exit 7'`,
		Args: atLeastName,
		RunE: func(cmd *cobra.Command, args []string) error {
			return asSSH(a.runSSH(cmd.Context(), args[0], nil, args[1:]))
		},
		ValidArgsFunction: a.completeWorkspace,
	}
}

func newExec(a *app) *cobra.Command {
	var tty bool
	cmd := &cobra.Command{
		Use:   "exec NAME -- CMD [ARG...]",
		Short: "Run a program in a workspace; its arguments arrive as given, its exit status comes back",
		Long: `Runs one program with the system's ssh. Each argument arrives as it stands here, blanks, quotes and dollar signs included.
The exit status is the program's; 255 where the connection, or carrel itself, failed.`,
		Example: `  carrel exec fraud -- python -c 'print("hello  world")'`,
		Args:    atLeastName,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return asSSH(usagef("carrel exec: CMD is missing: carrel exec %s -- CMD [ARG...]", args[0]))
			}
			option := "-T"
			if tty {
				option = "-tt"
			}
			quoted := make([]string, len(args)-1)
			for i, arg := range args[1:] {
				quoted[i] = sshconfig.QuoteShell(arg)
			}
			return asSSH(a.runSSH(cmd.Context(), args[0], []string{option, "--"}, []string{strings.Join(quoted, " ")}))
		},
		ValidArgsFunction: a.completeWorkspace,
	}
	cmd.Flags().BoolVarP(&tty, "tty", "t", false, "give the program a terminal")
	return cmd
}

func atLeastName(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return asSSH(usagef("%s: NAME is missing; see `%s --help`", cmd.CommandPath(), cmd.CommandPath()))
	}
	return nil
}

// runSSH refreshes the managed file and runs ssh with it.
func (a *app) runSSH(ctx context.Context, ref string, before, after []string) error {
	api, err := a.connect()
	if err != nil {
		return err
	}
	if !api.dep.Stored() {
		return failf(exitSignIn, "%v", errNoSSHWithoutLogin)
	}
	entries, err := a.refreshSSH(ctx, api)
	if err != nil {
		return err
	}
	entry, err := findEntry(entries, api.dep.Name, ref)
	if err != nil {
		return err
	}
	place, err := a.place()
	if err != nil {
		return err
	}
	argv := append([]string{"ssh", "-F", place.Managed}, before...)
	argv = append(append(argv, entry.Alias), after...)
	code, err := a.sys.Run(ctx, argv)
	if err != nil {
		return failf(exitSSH, "run ssh: %v; `carrel doctor` says what is missing", err)
	}
	if code != 0 {
		return remoteExit(code)
	}
	return nil
}

// completeWorkspace offers the names that were learnt last, without asking the gateway.
func (a *app) completeWorkspace(_ *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveDefault
	}
	dep, err := a.deployment()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, h := range dep.Hosts {
		if strings.HasPrefix(h.Workspace, toComplete) {
			names = append(names, h.Workspace)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
