"""Keeps a folder that any number of engines share within ``capacity_bytes``: no server, no daemon.

Every engine that has the option runs the same code, below ``<root_dir>/kvtier_space/``. One of
them at a time is the cleaner; a cron job may clean too (``kvtier evict``).

Terms. The cleaner leads a term, a folder ``terms/<number>`` made with ``mkdir``: exactly one engine
can make each. The maker of a term fences all lower ones: it removes their contents, and then the
folders. A removed folder takes no more files, even from a process that has it open; so a cleaner
that was stopped, and wakes up, can grant nothing. The lease in ``terms/<number>/lease`` is a count
that the cleaner increments; others watch it, and make the next term when it has stood still for
``Timing.lease_s`` of their own monotonic clock, or when its process is known to have ended. No two
clocks are compared.

Grants. A writer stores only into a grant: a folder ``terms/<number>/grant-...`` that the cleaner
makes for it, with the allowed bytes in its name. A block is written there, and renamed to its
place. When a grant is used up, its writer's last action there is to write a receipt: a list of
the stored blocks. The cleaner takes the receipt, and removes the grant. It revokes the grants of
dead writers (their process is gone, or their count in ``want-...`` stands still): the contents of
the folder are removed, then the folder, so that later attempts of a writer that was only stopped
fail. The bytes of such a grant count as lost until the next scan.

The account. ``bound = manifest + granted + lost + others``. The manifest has each known block, with
its size and the epoch of its last use; a scan of the folders rebuilds it periodically.
Granted: all grants without a receipt, in full. Others: files that are not blocks.

# Invariant: block files and unfinished ones take at most ``bound`` bytes. A grant is made only
#            while bound + grant <= capacity. Checked: issue,
#            test_the_folder_never_holds_more_than_its_bound.
# Invariant: the manifest forgets a block only after its file was removed, or found to be gone.
#            Blocks are evicted beside the cleaner's rounds: one whose receipt was taken since its
#            eviction began stays known. Checked: removed,
#            test_the_folder_never_holds_more_than_its_bound.
# Invariant: until a term has counted, only a file that was really removed lowers the bound.
#            A bound begins at the capacity if the term before kept that, else without limit.
#            Checked: removed, test_a_new_cleaner_grants_before_it_has_counted.

Uses. A writer lists the blocks that it has loaded in ``uses-...``; the cleaner assigns them its
current epoch, a counter, and evicts blocks of the lowest epoch first. Evicted blocks are named in
``removed/<term>-<number>``, which every engine reads, so that all of them forget the block.

Files. ``protocol.py`` defines what engines share: names, contents, folders, pauses. ``writer.py``
and ``cleaner.py`` are the two sides of it, with ``account.py`` and ``removals.py`` for the cleaner:
they run on any folder and any clock. On a real disk, ``small_files.py`` has the folders,
``eviction.py`` removes and scans block files, and ``folder_bound.py`` runs both sides for one tier.
"""
